"""Children forked from a process that has torch loaded: to be killed, or to meet a failing disk."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


class Child:
    """A forked process that calls `action`, whose result can be pickled."""

    def __init__(self, action: Callable[..., Any], *arguments: Any) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            outcome = Outcome(action(*arguments))
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
        os.write(writer, pickle.dumps(outcome))
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
        return pickle.loads(written) if written else Outcome(error="it ended without a result")


def in_child(action: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call `action` in a forked process."""
    return Child(action, *arguments).wait()


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

    original_open, original_fsync = open, os.fsync

    def open_(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = original_open(path, mode, *arguments, **options)
        if mode.startswith("r") or not str(path).startswith(inside):
            return file
        write = file.write

        def write_halves(content: Any) -> int:
            half = len(content) // 2
            meet("write", path)
            write(content[:half])
            file.flush()
            meet("write the rest of", path)
            write(content[half:])
            return len(content)

        file.write = write_halves  # type: ignore[method-assign]
        return file

    def fsync(descriptor: int) -> None:
        meet("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        original_fsync(descriptor)

    io.open = builtins.open = open_  # type: ignore[assignment]
    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)
