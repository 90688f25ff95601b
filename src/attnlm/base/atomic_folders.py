"""Folders that appear complete or not at all, and locks that end with the process that holds them.

A workspace is a hidden folder in which another folder is made before it is moved into place. A
workspace or temporary file that a killed process left is removed when it is a day old.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnlm.base.errors import AttnlmError

_LOCK = ".lock"
_WORKSPACE = ".unfinished-"
_SET_ASIDE = ".replaced-"
_DAY = 86_400  # seconds


@contextlib.contextmanager
def locked_for_training(folder: Path, hint: str) -> Iterator[None]:
    """Lock the folder of a run or ladder in this context, so that no other process trains in it.

    The lock is on the file .lock in the folder, which stays. Raises AttnlmError, with `hint`, if
    another process has locked it, or if the file can't be opened.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / _LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise AttnlmError(f"{folder.name} is being trained by another process", hint) from None
    except OSError as error:
        message = f"cannot lock {folder / _LOCK}: {error.strerror}"
        hint = "check its permissions and the free space, or remove it if it is a link"
        raise AttnlmError(message, hint) from None
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return True if a process trains in this folder, False if not or if unknown."""
    from filelock import FileLock, Timeout

    if not (folder / _LOCK).exists():
        return False
    try:
        with FileLock(folder / _LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def remove_leftovers(leftovers: Iterable[Path]) -> None:
    """Remove the temporary files and folders whose newest file is older than a day.

    Links, and what can't be removed, stay.
    """
    for leftover in leftovers:
        with contextlib.suppress(OSError):
            newest = max(path.lstat().st_mtime for path in (leftover, *leftover.rglob("*")))
            if leftover.is_symlink() or time.time() - newest < _DAY:
                continue
            if leftover.is_dir():
                delete_folder(leftover)
            else:
                leftover.unlink()


@contextlib.contextmanager
def workspace(root: Path) -> Iterator[Path]:
    """Yield a hidden folder in `root`, deleted afterwards. First remove old workspaces."""
    root.mkdir(parents=True, exist_ok=True)
    remove_unfinished_folders(root)
    folder = Path(tempfile.mkdtemp(prefix=_WORKSPACE, dir=root))
    try:
        yield folder
    finally:
        delete_folder(folder)


def delete_folder(folder: Path) -> None:
    """Delete a folder without following links in it. Anything that can't be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)


def exchange_folders(new: Path, target: Path) -> None:
    """Swap the folder `new` of a workspace with the folder `target`; on errors, change nothing.

    A process that is killed halfway leaves the old folder under a hidden name, from which
    `finish_exchanges` puts it back.
    """
    aside = target.with_name(f"{_SET_ASIDE}{secrets.token_hex(4)}-{target.name}")
    target.rename(aside)
    try:
        new.rename(target)
    finally:
        if not os.path.lexists(target):
            aside.rename(target)
    with contextlib.suppress(FileNotFoundError):  # another process has finished the exchange
        aside.rename(new)


def finish_exchanges(root: Path, file: str) -> None:
    """Put back, or else delete, the folders with this file that killed processes set aside."""
    for aside in root.glob(f"{_SET_ASIDE}{'[0-9a-f]' * 8}-?*"):
        target = aside.with_name(aside.name[len(_SET_ASIDE) + 9 :])
        with contextlib.suppress(OSError):
            if not (aside / file).is_file():
                continue  # not ours
            if not os.path.lexists(target):
                aside.rename(target)
            elif aside.is_symlink():
                aside.unlink()
            else:
                delete_folder(aside)


def remove_unfinished_folders(root: Path) -> None:
    """Remove the workspaces that killed processes left in `root`."""
    # Match only names by `mkdtemp`: a folder for exports may also have a file .unfinished-novel.
    remove_leftovers(root.glob(_WORKSPACE + "?" * 8))


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
