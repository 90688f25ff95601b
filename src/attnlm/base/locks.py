"""Locks that the system holds for a process, and drops when it ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Locks a file or folder; yields whether it did. Whoever locks a thing is alive.

    False: Windows, and some network file systems, have no such locks. Raises BlockingIOError when
    somebody else holds the lock, unless `wait`, and OSError when there is nothing at `path`.
    """
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield _lock(descriptor, wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked_new(make: Callable[[], Path]) -> Iterator[Path]:
    """The temporary file or folder that `make` makes, locked: `clear` leaves it alone."""
    while True:
        made = make()
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(FileNotFoundError):
                lock.enter_context(locked(made, wait=True))
            # Somebody may have taken it for a leftover before it was locked.
            if made.exists():
                yield made
                return


def clear(leftovers: Iterable[Path], remove: Callable[[Path], object]) -> None:
    """Removes the temporary files or folders whose makers are dead: nobody locks them any more."""
    for leftover in leftovers:
        # What can't be removed stays: no reason to fail.
        with contextlib.suppress(OSError), locked(leftover) as is_dead:
            if is_dead:
                remove(leftover)
