"""Locks that the system holds for a process, and drops when it ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Locks a file or folder; yields whether it did. Whoever locks a thing is alive.

    False: Windows, and some network file systems, have no such locks. Raises BlockingIOError when
    somebody else holds the lock, unless `wait`, and OSError when there is nothing at `path`, or a
    link, a pipe or a device.
    """
    if sys.platform == "win32":
        yield False
        return
    # Without O_NONBLOCK, a pipe would be waited for without end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        if not _is_file_or_folder(os.fstat(descriptor)):
            raise OSError(errno.EINVAL, "it is neither a file nor a folder", str(path))
        yield _lock(descriptor, wait)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether somebody else holds the lock of a file or folder; False where nobody can tell."""
    try:
        with locked(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


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
    """Removes the temporary files or folders whose makers are dead: nobody locks them any more.

    What has such a name but is not ours (`is_ours`) stays, as does what can't be removed.
    """
    for leftover in leftovers:
        with contextlib.suppress(OSError):
            if is_ours(leftover):
                with locked(leftover) as is_dead:
                    if is_dead:
                        remove(leftover)


def is_ours(path: Path) -> bool:
    """Whether this is a file or folder of the user's own: no link, pipe or device.

    Raises OSError when there is nothing at `path`.
    """
    about = path.lstat()
    return _is_file_or_folder(about) and (sys.platform == "win32" or about.st_uid == os.geteuid())


def _is_file_or_folder(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
