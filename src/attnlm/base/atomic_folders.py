"""Folders that appear complete or not at all, and locks that end with the process that holds them.

A workspace is a hidden folder in which another folder is made before it is moved into place. The
next workspace in the same root removes the workspaces that killed processes left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from attnlm.base.errors import AttnlmError

if sys.platform != "win32":
    import fcntl

_WORKSPACE = ".unfinished-"
_held: ContextVar[tuple[Path, os.stat_result] | None] = ContextVar("held", default=None)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file or folder in this context, and yield True. The lock ends with the process.

    Yield False on Windows and some network file systems, which have no such locks. If the file is
    already locked, wait, or raise BlockingIOError if `wait` is False. Raises OSError if `path` does
    not exist or is a link.
    """
    if sys.platform == "win32":
        yield False
    else:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                has_lock = True
            except BlockingIOError:
                raise
            except OSError:
                has_lock = False
            yield has_lock
        finally:
            os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return True if a process has locked this file or folder, False if not or if unknown."""
    try:
        with locked(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def locked_new(make: Callable[[], Path]) -> Iterator[Path]:
    """Yield the temporary file or folder of `make`, locked so that `remove_abandoned` keeps it."""
    while True:
        made = make()
        with contextlib.ExitStack() as lock:
            with contextlib.suppress(FileNotFoundError):
                lock.enter_context(locked(made, wait=True))
            # Another process may have removed it as a leftover before it was locked.
            if made.exists():
                yield made
                return


def remove_abandoned(leftovers: Iterable[Path], remove: Callable[[Path], object]) -> None:
    """Remove the temporary files or folders that are not locked: their makers have ended.

    Links and files that can't be removed stay.
    """
    for leftover in leftovers:
        with contextlib.suppress(OSError), locked(leftover) as is_dead:
            if is_dead:
                remove(leftover)


@contextlib.contextmanager
def locked_for_training(path: Path, hint: str) -> Iterator[None]:
    """Lock the folder of a run or ladder in this context, so that no other process trains in it.

    `check_training_folder` then watches it. Raises AttnlmError, with `hint`, if another process has
    locked it. Windows and some network file systems have no such locks, so there nothing is raised.
    """
    with contextlib.ExitStack() as lock:
        try:
            # The path may be a link to a folder that the user keeps elsewhere.
            lock.enter_context(locked(Path(os.path.realpath(path))))
        except BlockingIOError:
            raise AttnlmError(f"{path.name} is being trained by another process", hint) from None
        lock.callback(_held.reset, _held.set((path, path.stat())))
        yield


class FolderGoneError(AttnlmError):
    """Raised when the folder that this process trains in was moved, removed or replaced."""


def check_training_folder(path: Path) -> None:
    """Raise FolderGoneError if `path` is in the folder where this process trains, and that is gone.

    A folder that was moved, removed or replaced by another one is gone. Called before each write.
    """
    if (held := _held.get()) is None or held[0] not in (path, *path.parents):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(held[0].stat(), held[1]):
            return
    raise FolderGoneError(
        f"{held[0]} was moved, removed or replaced during training",
        "nothing was written after that; if the folder was moved, resume the run at its new path",
    )


@contextlib.contextmanager
def workspace(root: Path) -> Iterator[Path]:
    """Yield a hidden folder in `root`, deleted afterwards. First remove leftover workspaces."""
    check_training_folder(root)
    root.mkdir(parents=True, exist_ok=True)
    remove_unfinished_folders(root)
    with locked_new(lambda: Path(tempfile.mkdtemp(prefix=_WORKSPACE, dir=root))) as folder:
        try:
            yield folder
        finally:
            delete_folder(folder)


def delete_folder(folder: Path) -> None:
    """Delete a folder without following links in it. Anything that can't be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)


def exchange_folders(new: Path, target: Path) -> None:
    """Swap the folder `new` of a workspace with the folder `target`; on errors, change nothing.

    Windows and some network file systems need two steps. A process that is killed between them
    leaves the old folder next to `target` under a hidden name.
    """
    if _exchange_at_once(new, target):
        return
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        if not os.path.lexists(target):
            aside.rename(target)
        raise
    aside.rename(new)


def _exchange_at_once(folder: Path, other: Path) -> bool:
    """Swap two folders in one step. Return False if the system can't. Raises OSError on failure."""
    here = -100
    swap = 2  # AT_FDCWD; RENAME_EXCHANGE, which macOS calls RENAME_SWAP
    paths = os.fsencode(folder), os.fsencode(other)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(*paths, swap)
        else:
            failed = libc.renameat2(here, paths[0], here, paths[1], swap)
    except (AttributeError, TypeError):
        return False
    error = ctypes.get_errno()
    if failed and error not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        raise OSError(error, os.strerror(error), str(other))
    return not failed


def remove_unfinished_folders(root: Path) -> None:
    """Remove the workspaces that killed processes left in `root`."""
    # Match only names by `mkdtemp`: a folder for exports may also have a file .unfinished-novel.
    remove_abandoned(root.glob(_WORKSPACE + "?" * 8), delete_folder)


def numbered_paths(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield the paths `<prefix>-001`, `<prefix>-002`, … in a folder."""
    return (folder / f"{prefix}-{number:03}" for number in itertools.count(1))


def move_to_free(new: Path, places: Iterable[Path]) -> Path:
    """Move the folder `new` to the first of `places` where nothing exists, and return this place.

    Raises FileExistsError if something exists at each place.
    """
    for path in places:
        # A rename would replace an empty folder, which may belong to somebody.
        if os.path.lexists(path):
            continue
        try:
            return new.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
