"""Data sets and runs: found by name, put in place whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attnlm.base import files
from attnlm.base.commands import KINDS, how_to_make
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.locks import clear, is_ours, locked, locked_new
from attnlm.base.names import LATEST, is_safe_name, latest_name
from attnlm.base.suggestions import suggestion

_WORKSPACE, _ASIDE = ".unfinished-", "old-"
_MOST_NAMED = 5
# Whoever lists runs looks for an instant whether each is locked.
_LOOKS, _BETWEEN_LOOKS = 3, 0.02  # seconds


def find_folder(name: str | Path | None, parent: Path, *, kind: str) -> Path:
    """The folder of a data set or run by its name below `parent`, by its path, or the latest.

    Raises AttnlmError, with the names that there are, when there is none, and UsageError where
    `name` is neither a name nor a path.
    """
    if name is None:
        return _latest(parent, kind)
    if not isinstance(name, str | os.PathLike):
        raise UsageError(
            f"a {kind} can't be of type {type(name).__name__}",
            f"give a name, a path or an opened {kind}",
        )
    if not str(name):
        raise UsageError(f"the name of a {kind} can't be empty", f"name a {kind}, or leave it out")
    below = parent / name
    if is_safe_name(str(name)) and is_folder(below):
        return below
    if is_folder(Path(name)):
        return Path(name)
    hint = how_to_make(kind, parent)
    if names := folder_names(parent, kind):
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        verb = "are" if len(names) > 1 else "is"
        there = f"there {verb} {', '.join(names[:_MOST_NAMED])}{more}"
        hint = suggestion(str(name), names, there)
    raise AttnlmError(f"no {kind} is called {str(name)!r} in {parent}", hint)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; a path that can't be one is none."""
    try:
        return path.is_dir()
    except OSError:  # too long a name, or a part of it that may not be looked into
        return False


def _latest(parent: Path, kind: str) -> Path:
    if not (parent / LATEST).exists():
        raise AttnlmError(f"there is no {kind} in {parent} yet", how_to_make(kind, parent))
    name = latest_name(parent)
    if not is_safe_name(name) or not (parent / name).is_dir():
        names = folder_names(parent, kind)
        raise AttnlmError(
            f"the latest {kind}, {name!r}, is no longer in {parent}",
            f"name one: {', '.join(names[:_MOST_NAMED])}" if names else how_to_make(kind, parent),
        )
    return parent / name


def folder_names(parent: Path, kind: str) -> list[str]:
    """Of the folders of that kind below `parent`, the newest first."""
    made = []
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            with contextlib.suppress(OSError):
                if is_safe_name(path.name):
                    made.append(((path / KINDS[kind][0]).stat().st_mtime_ns, path.name))
    return [name for _, name in sorted(made, reverse=True)]


@contextlib.contextmanager
def trained_alone(path: Path, hint: str) -> Iterator[None]:
    """Hold the folder's training lock, and refuse to write if the folder is moved or replaced.

    Raises AttnlmError, with `hint`, if another process holds the lock. (Windows and some network
    file systems can't tell.)
    """
    with contextlib.ExitStack() as lock:
        for look in reversed(range(_LOOKS)):
            try:
                # The user may keep the folder elsewhere, and have a link to it here.
                lock.enter_context(locked(Path(os.path.realpath(path))))
                break
            except BlockingIOError:
                if not look:
                    raise AttnlmError(
                        f"{path.name} is being trained by another process", hint
                    ) from None
                time.sleep(_BETWEEN_LOOKS)
        lock.enter_context(files.holding(path))
        yield


@contextlib.contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A hidden folder in `parent`, deleted in the end; those of killed processes go first."""
    files.check_held(parent)
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    with locked_new(lambda: Path(tempfile.mkdtemp(prefix=_WORKSPACE, dir=parent))) as folder:
        try:
            yield folder
        finally:
            delete_folder(folder)


def delete_folder(folder: Path) -> None:
    """Deletes a folder as far as that is allowed. What links in it lead to stays.

    Each folder in it is moved up before it is emptied: they may be nested deeper than Python's
    recursion and the system's paths go.
    """
    if sys.platform == "win32":
        shutil.rmtree(folder, ignore_errors=True)
        return
    found = [folder]
    for inner in found:
        with contextlib.suppress(OSError):
            # By its descriptor: nobody can put a link in its place meanwhile.
            descriptor = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found += _emptied(descriptor, folder)
            finally:
                os.close(descriptor)
    for inner in reversed(found):
        with contextlib.suppress(OSError):
            inner.rmdir()


def _emptied(descriptor: int, into: Path) -> Iterator[Path]:
    """Deletes the files of an open folder, and moves its folders into another one."""
    with os.scandir(descriptor) as entries:
        for entry in list(entries):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    moved = into / secrets.token_hex(8)
                    os.rename(entry.name, moved, src_dir_fd=descriptor)
                    yield moved
                else:
                    os.unlink(entry.name, dir_fd=descriptor)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left in `parent`, and undoes the replacement of a folder."""
    files.remove_leftovers(parent, LATEST)
    clear(parent.glob(f"{_WORKSPACE}*"), _undo)


def _undo(work: Path) -> None:
    """Brings back the folders that were set aside in `work`, and removes the rest.

    Where one of them is a link, another user's, or not named as we name them, all is left alone.
    """
    asides = list(work.glob(f"{_ASIDE}*"))
    folders = [folder for aside in asides if is_ours(aside) for folder in aside.iterdir()]
    if not all(map(is_ours, asides)) or not all(map(_is_named_folder_of_ours, folders)):
        return
    for folder in folders:
        if not os.path.lexists(work.parent / folder.name):
            folder.rename(work.parent / folder.name)
    delete_folder(work)


def _is_named_folder_of_ours(path: Path) -> bool:
    return is_safe_name(path.name) and is_ours(path) and path.is_dir()


def exchange(new: Path, target: Path) -> None:
    """The folders `new`, in a workspace, and `target`, beside it, change places, or nothing does.

    Where the system can't do that in one step, a process that is killed between the two steps
    leaves it to the next command to bring `target` back.
    """
    if _exchange_at_once(new, target):
        return
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=new.parent)) / target.name
    target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        if not os.path.lexists(target):
            aside.rename(target)
        raise
    aside.rename(new)


def _exchange_at_once(one: Path, other: Path) -> bool:
    """False where it can't be done: on Windows, and on some network file systems."""
    import ctypes

    here, swap = -100, 2  # AT_FDCWD; RENAME_EXCHANGE, which macOS calls RENAME_SWAP
    paths = os.fsencode(one), os.fsencode(other)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(*paths, swap)
        else:
            failed = libc.renameat2(here, paths[0], here, paths[1], swap)
    except (AttributeError, TypeError):
        return False
    if not failed:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(other))
