"""What most tests share: commands run as users run them, and how they end; a clock; a training.

    done = command("train", "--steps", "5", "--json", cwd=folder)      # it must succeed
    fails("train", "--hed", "4", cwd=folder, code=2, says="--hed", hints="--heads")

Both run the command in this process, since a new one takes seconds to start; `try_command` does the
same and asserts nothing. `run_in_new_process` is for what depends on the process: its locale, its
streams, its hash seed, what it imports. Where a test needs the process itself, to send it a signal
or to give it a terminal, `ATTNLM` is the beginning of its command line. `quick_run` trains without
a command.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest import mock

import attnlm
from attnlm.cli import exits
from attnlm.cli.app import run_command
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run

if TYPE_CHECKING:  # `python -m tools.use_installed` runs where pytest is not installed
    import pytest

QUICK: dict[str, Any] = {"steps": 4, "batch_size": 4, "block_size": 12, "seed": 1, "threads": 1}
ATTNLM = (sys.executable, "-m", "attnlm")


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    def fault(self) -> str | None:
        """Return what is wrong unless it succeeded, or failed in two lines with code 1 or 2."""
        lines = self.stderr.splitlines()
        errors = sum(line.startswith("error: ") for line in lines)
        if "Traceback" in self.stderr or "panicked" in self.stderr:
            return f"it shows a traceback: {lines[-1]}"
        if self.code == 0:
            return "it succeeds with an error" if errors else None
        if self.code not in (1, 2):
            return f"exit code {self.code}: {' / '.join(lines[-2:])}"
        if errors != 1 or not lines[-2].startswith("error: ") or not lines[-1].startswith("hint: "):
            return f"exit code {self.code}, but no error and hint: {' / '.join(lines[-3:])}"
        return None


def command(
    *arguments: object,
    cwd: Path,
    code: int = 0,
    stdin: str = "",
    **variables: str,
) -> Done:
    """Run a command in the folder `cwd`, with these environment variables.

    The exit code must be `code`, and the command must never show a traceback.
    """
    with contextlib.chdir(cwd), mock.patch.dict(os.environ, variables):
        done = try_command([str(argument) for argument in arguments], stdin.encode())
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def with_options(words: Iterable[str], *options: str) -> list[str]:
    """A command with these options, in place of its own: an option can't be given twice."""
    kept = list(words)
    for name, value in itertools.zip_longest(options, options[1:], fillvalue="--"):
        if name.startswith("--") and name in kept:
            at = kept.index(name)
            del kept[at : at + (1 if value.startswith("--") else 2)]
    return [*kept, *options]


def fails(*arguments: object, cwd: Path, code: int, says: str, hints: str) -> None:
    """The command fails with one line that says `says` and one that hints at `hints`."""
    done = command(*arguments, cwd=cwd, code=code)
    assert done.stdout == ""
    *_, error, hint = done.stderr.splitlines()
    assert error.startswith("error: ") and says in error, error
    assert hint.startswith("hint: ") and hints in hint, hint


def on_a_terminal(
    *arguments: str, cwd: Path, streams: Sequence[str] = ("stdout",), **env: str
) -> str:
    """Return what a command shows on a terminal that is connected to `streams`."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 2**16):
                shown.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    variables = {"TERM": "xterm-256color", "COLUMNS": "80", **env}
    with contextlib.ExitStack() as stack:
        terminal: dict[str, Any] = {
            name: stack.enter_context(os.fdopen(os.dup(theirs), "r" if name == "stdin" else "w"))
            for name in streams
        }
        os.close(theirs)
        with contextlib.chdir(cwd), mock.patch.dict(os.environ, variables):
            done = try_command(arguments, streams=terminal)
    reader.join()
    os.close(ours)
    assert done.code == 0, done.stderr
    return b"".join(shown).decode()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 40) -> Terminal:
    """Make stderr a terminal with this number of columns."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def try_command(
    arguments: Sequence[str], stdin: bytes = b"", streams: Mapping[str, Any] = MappingProxyType({})
) -> Done:
    """Run a command in this process through the program's entry point.

    The result lacks what goes to `streams`.
    """
    stdout, stderr = (io.TextIOWrapper(io.BytesIO()) for _ in range(2))
    replaced: dict[str, Any] = {
        "argv": ["attnlm", *arguments],
        "stdin": io.TextIOWrapper(io.BytesIO(stdin)),
        "stdout": stdout,
        "stderr": stderr,
    }
    with mock.patch.multiple(sys, **{**replaced, **streams}):
        code = exits.run(run_command)
        for name in streams:
            if streams[name] is None:  # the program has opened the null device
                getattr(sys, name).close()
    return Done(code, _written(stdout), _written(stderr))


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(errors="replace")


def run_in_new_process(
    arguments: Sequence[str],
    cwd: Path,
    stdin: bytes = b"",
    env: Mapping[str, str | None] = MappingProxyType({}),
    through: Sequence[str] = (),
) -> Done:
    """Run a command in a new process; a variable that is None is unset there."""
    variables = {**os.environ, "PYTHONWARNINGS": "error", **env}
    done = subprocess.run(
        [*through, *ATTNLM, *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        timeout=120,
        env={name: value for name, value in variables.items() if value is not None},
    )
    return Done(
        done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )


def quick_run(data: Dataset | Path, model: str = "multi-head", **more: Any) -> Run:
    """Train a small model for few steps on a data set; FOLDER/data/NAME has FOLDER/checkpoints."""
    path = data if isinstance(data, Path) else data.path
    folder = path.parent.parent / "checkpoints"
    return attnlm.train(path, **{"checkpoint_dir": folder, **QUICK, **variant(model), **more})


def forked() -> ForkServerContext:
    """Return a context that forks processes from one that has loaded every module they need."""
    context = multiprocessing.get_context("forkserver")
    preloaded = ["tests.processes", "torch._dynamo"]
    context.set_forkserver_preload(preloaded)  # works only before the first process is started
    return context


class Clock:
    """Replacement for `time.perf_counter` that advances by `tick` seconds with each call.

    A budget has room for the same work on every machine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick
        monkeypatch.setattr(time, "perf_counter", self._read)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds

    def _read(self) -> float:
        self.now += self.tick
        return self.now
