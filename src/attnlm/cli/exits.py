"""Turn the end of a command into an exit code and at most two lines: users see no traceback.

The codes are 0 for success, 1 for a problem, 2 for invalid arguments, 70 for an internal error, and
129, 130 and 143 after a signal.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from attnlm.base import process
from attnlm.base.errors import AttnlmError
from attnlm.base.files import suggest_remedy
from attnlm.base.own_code import CodeNotAcceptedError, files_that_ran, own_traceback
from attnlm.base.process import Interrupted
from attnlm.base.suggestions import suggestion
from attnlm.cli import console
from attnlm.compute.processes import is_launched


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Run `command` and end the process."""
    process.ends_process = True
    for signum in process.stop_signals():
        signal.signal(signum, process.interrupt)
    try:
        code = run(command)
        # The command is done, but a signal could still interrupt Python's shutdown.
        for signum in process.stop_signals():
            signal.signal(signum, signal.SIG_IGN)
    except KeyboardInterrupt as error:  # after the command, or while its failure was printed
        code = _exit_code_of(error)
    # Skip Python's shutdown. After a signal, it would wait for threads that still run. In a process
    # of torchrun, it would wait for the other processes, which may never answer, and with gloo's
    # thread it may wait for itself. No output is lost: it is flushed, or has no reader.
    if code > 128 or is_launched():
        os._exit(code)
    sys.exit(code)


def _prepare_streams() -> None:
    """Make the streams UTF-8 and blocking; replace missing streams by the null device."""
    # File names need not be Unicode, and typed input need not be UTF-8. A closed stdout stays one
    # that cannot be written: the result would be lost.
    for name, mode, errors, access in (
        ("stdin", "r", "replace", os.O_RDONLY),
        ("stdout", "w", "surrogateescape", os.O_RDONLY),
        ("stderr", "w", "backslashreplace", os.O_WRONLY),
    ):
        stream = getattr(sys, name)
        if stream is None:
            file: Any = os.fdopen(os.open(os.devnull, access), f"{mode}b", 0)
            stream = io.TextIOWrapper(file, write_through=True)  # nothing is left to fail at exit
        if sys.platform != "win32":
            # Python takes a pipe that another program left non-blocking for one that has ended, and
            # texts would be cut short without an error.
            with contextlib.suppress(OSError, ValueError):  # a stream in memory, or closed
                os.set_blocking(stream.fileno(), True)
        if mode == "w" and stream.isatty():
            terminal = _Terminal(stream.fileno(), "w", closefd=False)
            stream = io.TextIOWrapper(io.BufferedWriter(terminal), line_buffering=True)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
        setattr(sys, name, stream)


class _Terminal(io.FileIO):
    """A terminal stream that discards what is written after the terminal was closed."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(content).nbytes


def _exit_code_of(error: KeyboardInterrupt) -> int:
    return 128 + (error.signum if isinstance(error, Interrupted) else signal.SIGINT)


def run(command: Callable[[], object]) -> int:
    """Run `command` and return its exit code; print a failure in two lines."""
    _prepare_streams()
    try:
        command()
    except KeyboardInterrupt as error:
        return _exit_code_of(error)
    except typer.Exit as error:
        return error.exit_code
    except SystemExit as error:  # of Typer, after completion
        return int(error.code or 0)
    except BrokenPipeError:
        # The reader is gone. Send buffered output to the null device, or Python would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BaseException as error:  # noqa: BLE001 - users see no traceback
        if process.came is not None:  # PyTorch swallowed Interrupted, and is partly loaded
            return 128 + process.came
        lines = None if isinstance(error, AttnlmError) else own_traceback(error)
        if lines is not None:
            for line in lines.splitlines():
                console.say(line)
            return 1
        code, message, hint = _explained(error)
        console.fail(message, hint)
        return code
    return 0


def _explained(error: BaseException) -> tuple[int, str, str]:
    """Return the exit code of an error, what is wrong, and what to do."""
    text = "".join(str(error).splitlines()[:1])
    if isinstance(error, CodeNotAcceptedError):
        again = shlex.join(["attnlm", *sys.argv[1:], "--code", error.accepts])
        return error.exit_code, error.message, f"read it, then: {again}"
    if isinstance(error, AttnlmError):
        return error.exit_code, error.message, error.hint
    if hasattr(error, "format_message"):  # an exception of Typer: invalid arguments
        return 2, *_explained_usage(error)
    is_full = isinstance(error, RuntimeError) and re.search("out of memory|t allocate memory", text)
    if isinstance(error, MemoryError) or is_full:
        hint = (
            "close other programs, use a shorter text or a smaller model, or in training lower "
            "`batch_size`, `block_size` or `embed_dim`"
        )
        return 1, "there is not enough memory", hint
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        if not place and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EBADF):
            place = "cannot write the output: "  # an error of a file would have a name
        elif not place and error.errno == errno.ENOENT:
            place = "the current folder: "
        return 1, f"{place}{error.strerror or text}", suggest_remedy(error)
    if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding():
        return 1, f"the locale has no way to name the file {error.object!r}", "set PYTHONUTF8=1"
    if os.environ.get("ATTNLM_DEBUG") == "1":
        traceback.print_exception(error)
    name = type(error).__name__
    if ran := files_that_ran():  # as when own code disables gradients
        hint = "ATTNLM_DEBUG=1 shows where the error arose"
        if sys.argv[1:2] != ["check"]:
            hint = f"look for a mistake with attnlm check; {hint}"
        return 1, f"{name} with the code of {', '.join(ran)}: {text}", hint
    return (
        70,
        f"internal error: {name}: {text}",
        "please report it with the output of ATTNLM_DEBUG=1",
    )


def _explained_usage(error: Any) -> tuple[str, str]:
    """Return what is wrong with the arguments, and a similar name or where to find help."""
    message = re.split(r"\. Did you mean | \(Possible options: |\.?$", error.format_message())[0]
    path = error.ctx.command_path if error.ctx else " ".join(["attnlm", *sys.argv[1:2]])
    hint = f"see {path} --help"
    if unknown := re.match(r"No such (?:command '|option: )([^\s']+)", message):
        command = error.ctx.command
        spelled = (o for p in command.params for o in (*p.opts, *p.secondary_opts) if len(o) > 2)
        names = [o if o.startswith("-") else o.upper() for o in spelled]
        hint = suggestion(unknown[1], [*getattr(command, "commands", ()), *names], hint)
    return message[:1].lower() + message[1:], hint
