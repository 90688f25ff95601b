"""Children forked from a process that has torch loaded: to be killed, or to meet a failing disk."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.command import Done, here


@dataclass(frozen=True)
class Outcome:
    """How a child ended: what it returned, what it raised, or the signal that killed it."""

    result: Any = None
    error: str | None = None
    """`Type: message`."""
    signum: int | None = None

    @property
    def failure(self) -> str | None:
        """Return its result, if this says what went wrong, or how else it ended."""
        failure: str | None = self.result or self.error
        return failure if self.signum is None else f"signal {self.signum}"


@dataclass
class Child:
    """A forked process that calls `action`, whose result is JSON."""

    action: Callable[[], Any]
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            outcome: dict[str, Any] = {"result": self.action()}
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            outcome = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(outcome).encode())
        os._exit(0)

    def kill(self) -> None:
        """Kill it, as `kill -9` does."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        """Wait for its end."""
        with os.fdopen(self._reader, "rb") as reader:
            written = reader.read()
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return Outcome(signum=os.WTERMSIG(status))
        if not written:
            return Outcome(error="it ended without a result")
        return Outcome(**json.loads(written))


def in_child(action: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call `action` in a forked process."""
    return Child(lambda: action(*arguments)).wait()


def command_in_child(
    command: Sequence[str], folder: Path, before: Callable[[], object]
) -> tuple[Done, str | None]:
    """Run a command in `folder`, in a forked process, after `before`; return how it ended, and
    what is wrong with its end."""

    def run() -> list[Any]:
        os.chdir(folder)
        before()
        done = here(command)
        return [done.code, done.stdout, done.stderr]

    outcome = in_child(run)
    if outcome.result is None:
        return Done(0, "", ""), outcome.failure
    done = Done(*outcome.result)
    return done, done.fault()


_OF_PATHS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def before_each_event(folder: Path, act: Callable[[str], None]) -> None:
    """Call `act` before all that this process does to files below `folder`, until it ends.

    A write is two events: before it, and when half of it is on its way to the disk. `act` gets the
    name of the event; what it raises is the system's answer.
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
        is_written = not mode.startswith("r") and str(file).startswith(inside)
        return Written(opened) if is_written else opened

    def fsync(descriptor: int) -> None:
        meet("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        original_fsync(descriptor)

    io.open = builtins.open = open_
    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)
