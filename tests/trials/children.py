"""Children forked from a process that has torch loaded: to be killed, or to meet a failing disk."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.trials.trial import Tally

Run = Callable[[Tally, Path], None]


def in_own_process(run: Run, draws: bool = False) -> Run:
    """`run`, in a new process: no thread runs in it yet, so that it may fork.

    Its runs have no real curve, which would take longer than they do, unless it `draws`.
    """

    def anew(tally: Tally, folder: Path) -> None:
        written = folder / "tally.json"
        asked = [run.__module__, run.__name__, asdict(tally), str(folder), str(written), draws]
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(asked), file=server.stdin, flush=True)
        try:
            assert server.stdout.readline() == "0\n", f"the process of {run.__module__} failed"
        except BaseException:  # such as a time limit: its answer may come when another is awaited
            server.kill()
            _server.cache_clear()
            raise
        tried = Tally(**json.loads(written.read_text()))
        tally.cases, tally.failures = tried.cases, tried.failures

    return anew


@cache
def _server() -> subprocess.Popen[str]:
    """Loads all once, for the processes that it forks one after another."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        encoding="utf-8",
    )


_SERVER = """
import dataclasses, importlib, json, os, pathlib, sys
import attnlm
from attnlm.see import curves
from tests.trials.trial import Tally

def run(module, name, tally, folder, written, draws):
    if draws:
        import matplotlib.backends.backend_agg, matplotlib.figure
    else:
        curves.draw_run = lambda run, path: curves.files.write_bytes(path, b"a picture")
    tally = Tally(**tally)
    getattr(importlib.import_module(module), name)(tally, pathlib.Path(folder))
    pathlib.Path(written).write_text(json.dumps(dataclasses.asdict(tally)))

loaded = [getattr(attnlm, name) for name in attnlm.__all__]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what trials print is none
for asked in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0)
        run(*json.loads(asked))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """How a child ended: what it returned, what it raised, or the signal that killed it."""

    result: Any = None
    error: str | None = None
    """`Type: message`."""
    signum: int | None = None

    @property
    def failure(self) -> str | None:
        """What went wrong: its result, where that says so, or how else it ended."""
        failure: str | None = self.result or self.error
        return failure if self.signum is None else f"signal {self.signum}"


@dataclass
class Child:
    """A forked process that makes `action`, whose result is JSON."""

    action: Callable[[], Any]
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            told: dict[str, Any] = {"result": self.action()}
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is told
            told = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(told).encode())
        os._exit(0)

    def kill(self) -> None:
        """As `kill -9` does."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        """Waits for its end."""
        with os.fdopen(self._reader, "rb") as reader:
            told = reader.read()
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return Outcome(signum=os.WTERMSIG(status))
        return Outcome(**json.loads(told)) if told else Outcome(error="it ended without a word")


def in_child(action: Callable[[], Any]) -> Outcome:
    """What becomes of `action` in a forked process."""
    return Child(action).wait()


_OF_PATHS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def before_each_event(folder: Path, act: Callable[[str], None]) -> None:
    """Calls `act` before all that this process does to files below `folder`, until it ends.

    A write is two events: before it, and when half of it is on its way to the disk. `act` is told
    what is about to be done; what it raises is what the system would have answered.
    """
    inside = str(folder)
    acting = False

    def meet(event: str, path: object) -> None:
        nonlocal acting
        if not acting and isinstance(path, (str, Path)) and str(path).startswith(inside):
            acting = True
            try:
                act(f"{event} {Path(path).name}")
            finally:
                acting = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR):
                meet(event, path)
        elif event in _OF_PATHS:
            meet(event, arguments[0])

    class Written:
        """A file that is being written."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Written:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def write(self, content: Any) -> int:
            meet("write", self._file.name)
            half = len(content) // 2
            self._file.write(content[:half])
            self._file.flush()
            meet("write the rest of", self._file.name)
            self._file.write(content[half:])
            return len(content)

    original_open, original_fsync = open, os.fsync

    def open_(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        opened = original_open(file, mode, *arguments, **options)
        written = not mode.startswith("r") and str(file).startswith(inside)
        return Written(opened) if written else opened

    def fsync(descriptor: int) -> None:
        meet("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        original_fsync(descriptor)

    io.open = builtins.open = open_
    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)
