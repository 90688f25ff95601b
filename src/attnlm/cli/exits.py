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
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from attnlm.base import signals
from attnlm.base.errors import AttnlmError
from attnlm.base.files import suggest_remedy
from attnlm.base.own_code import CodeNotAcceptedError, files_that_ran, own_traceback
from attnlm.base.signals import Interrupted
from attnlm.base.suggestions import equivalent_name, suggestion
from attnlm.cli import console
from attnlm.compute.processes import is_launched


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Run `command` and end the process."""
    signals.ends_process = True
    for signum in signals.stop_signals():
        signal.signal(signum, signals.interrupt)
    try:
        code = run(command)
        # The command is done, but a signal could still interrupt Python's shutdown.
        for signum in signals.stop_signals():
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
        stream = getattr(sys, name) or _opened_null_device(mode, access)
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


def _opened_null_device(mode: str, access: int) -> io.TextIOWrapper:
    file: Any = os.fdopen(os.open(os.devnull, access), f"{mode}b", 0)
    return io.TextIOWrapper(file, write_through=True)  # holds nothing back that fails at the end


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
    except CodeNotAcceptedError as error:
        again = shlex.join(["attnlm", *sys.argv[1:], "--code", error.accepts])
        console.fail(error.message, f"read it, then: {again}")
        return error.exit_code
    except AttnlmError as error:
        console.fail(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt as error:
        return _exit_code_of(error)
    except typer.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        # The reader is gone. Send buffered output to the null device, or Python would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BaseException as error:  # noqa: BLE001 - users see no traceback
        if signals.came is not None:  # PyTorch swallowed Interrupted, and is partly loaded
            return 128 + signals.came
        return _explain(error)
    return 0


def _explain(error: BaseException) -> int:
    text = str(error)
    if (lines := own_traceback(error)) is not None:
        for line in lines.splitlines():
            console.say(line)
        return 1
    if hasattr(error, "format_message"):  # an exception of Typer: invalid arguments
        message = str(error.format_message()).splitlines()[0]
        message = re.split(r" Did you mean | \(Possible options: ", message)[0].removesuffix(".")
        console.fail(message[:1].lower() + message[1:], _usage_hint(error))
        return 2
    has_no_memory = "out of memory" in text or "can't allocate memory" in text
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and has_no_memory):
        console.fail(
            "there is not enough memory",
            "close other programs, use a shorter text or a smaller model, or in training lower "
            "--batch-size, --block-size or --embed-dim",
        )
        return 1
    if isinstance(error, OSError):
        prefix = ""
        if error.filename:
            prefix = f"{error.filename}: "
        elif error.errno in (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EBADF):
            prefix = "cannot write the output: "  # an error of a file would have a name
        elif error.errno == errno.ENOENT:
            prefix = "the current folder: "
        console.fail(f"{prefix}{error.strerror or error}", suggest_remedy(error))
        return 1
    if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding():
        console.fail(f"the locale has no way to name the file {error.object!r}", "set PYTHONUTF8=1")
        return 1
    if os.environ.get("ATTNLM_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    if ran := files_that_ran():  # as when own code disables gradients
        console.fail(
            f"{type(error).__name__} with the code of {', '.join(ran)}: "
            f"{''.join(text.splitlines()[:1])}",
            "look for a mistake with attnlm check; ATTNLM_DEBUG=1 shows where the error arose",
        )
        return 1
    console.fail(
        f"internal error: {type(error).__name__}: {''.join(text.splitlines()[:1])}",
        "please report it with the output of ATTNLM_DEBUG=1",
    )
    return 70


def _usage_hint(error: Any) -> str:
    """Return the hint for invalid arguments: a similar name, or the command that shows help.

    For an option that the command does not have, the hint names a similar option or argument of the
    command, or other commands that have the option.
    """
    if error.ctx is None:  # as when an option has no value
        named = [name for name in sys.argv[1:2] if not name.startswith("-")]
        return f"see {' '.join(['attnlm', *named])} --help"
    command = error.ctx.command
    otherwise = f"see {error.ctx.command_path} --help"
    if unknown := re.match(r"No such command '(\S+)'", error.message):
        names = [*command.list_commands(error.ctx), *_visible_options(command)]
        return suggestion(unknown[1], names, otherwise)
    if not hasattr(error, "possibilities"):
        return otherwise
    typed = error.option_name
    if not equivalent_name(typed, _visible_options(command)):
        arguments = [p.name for p in command.params if p.param_type_name == "argument"]
        if argument := equivalent_name(typed, arguments):
            words = [name.upper() for name in arguments[: arguments.index(argument) + 1]]
            usage = " ".join([error.ctx.command_path, *words])
            return f"{argument.upper()} is an argument, not an option: {usage}"
        root = error.ctx.find_root().command
        others = {name: root.get_command(error.ctx, name) for name in root.list_commands(error.ctx)}
        option_of = {
            name: equivalent_name(typed, _visible_options(others[name])) for name in others
        }
        if having := [name for name in option_of if option_of[name]]:
            return f"{option_of[having[0]]} is an option of attnlm {', '.join(having)}"
    return suggestion(typed, _visible_options(command), otherwise)


def _visible_options(command: Any) -> list[str]:
    shown = (p for p in command.params if not p.hidden)
    return [o for p in shown for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
