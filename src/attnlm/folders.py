"""Data sets and runs: found by name, put in place whole."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnlm import files
from attnlm.errors import AttnlmError, UsageError
from attnlm.locks import clear, is_ours, locked, locked_new

_LATEST = "latest"
_WORKSPACE, _ASIDE = ".unfinished-", "old-"
_LONGEST_LATEST = 2**10  # bytes
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MOST_NAMED = 5
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')


def is_safe_name(name: str) -> bool:
    """Whether every system takes this as a file's name, and we do not need it ourselves."""
    return (
        0 < len(name.encode(errors="replace")) <= 120
        and name.lower() != _LATEST
        and name.isprintable()
        and not name.startswith((".", "-", " "))
        and not name.endswith((".", " "))
        and not _FORBIDDEN.search(name)
        and not _RESERVED.fullmatch(name)
    )


def check_name(name: str, flag: str) -> None:
    """Raises UsageError where a name that the user chose can't be a folder's."""
    if not is_safe_name(name):
        raise UsageError(
            f"{flag} {name!r} can't be a folder's name on every system",
            "use letters, digits, - and _; 'latest' is taken",
        )


def find_folder(name: str | Path | None, parent: Path, *, kind: str, hint: str) -> Path:
    """The folder of a data set or run by its name below `parent`, by its path, or the latest.

    Raises AttnlmError, with the names that there are, when there is none.
    """
    if name is None:
        return _latest(parent, kind, hint)
    below = parent / name
    if is_safe_name(str(name)) and is_folder(below):
        return below
    if is_folder(Path(name)):
        return Path(name)
    names = _names(parent)
    if near := difflib.get_close_matches(str(name), names, n=1):
        hint = f"did you mean {near[0]}?"
    elif names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        hint = f"there is {', '.join(names[:_MOST_NAMED])}{more}"
    raise AttnlmError(f"no {kind} is called {str(name)!r} in {parent}", hint)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; a path that can't be one is none."""
    try:
        return path.is_dir()
    except OSError:  # too long a name, or a part of it that may not be looked into
        return False


def write_latest(parent: Path, name: str) -> None:
    """Records which folder below `parent` was made last."""
    files.write_bytes(parent / _LATEST, f"{name}\n".encode())


def _latest(parent: Path, kind: str, hint: str) -> Path:
    if not (parent / _LATEST).exists():
        raise AttnlmError(f"there is no {kind} in {parent} yet", hint)
    name = files.read_bytes(parent / _LATEST, _LONGEST_LATEST).decode(errors="replace").strip()
    if not is_safe_name(name) or not (parent / name).is_dir():
        raise AttnlmError(
            f"the latest {kind}, {name!r}, is no longer in {parent}",
            f"name one: {', '.join(_names(parent)[:5])}" if _names(parent) else hint,
        )
    return parent / name


def _names(parent: Path) -> list[str]:
    if not parent.is_dir():
        return []
    return sorted(p.name for p in parent.iterdir() if p.is_dir() and is_safe_name(p.name))


@contextlib.contextmanager
def trained_alone(path: Path, hint: str) -> Iterator[None]:
    """Nobody else trains what is in this folder meanwhile.

    Raises AttnlmError, with `hint`, when somebody does. (Windows and some network file systems
    can't tell.)
    """
    with contextlib.ExitStack() as lock:
        try:
            # The user may keep the folder elsewhere, and have a link to it here.
            lock.enter_context(locked(Path(os.path.realpath(path))))
        except BlockingIOError:
            raise AttnlmError(f"{path.name} is being trained by another process", hint) from None
        yield


@contextlib.contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A hidden folder in `parent`, deleted in the end; those of killed processes go first."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    with locked_new(lambda: Path(tempfile.mkdtemp(prefix=_WORKSPACE, dir=parent))) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left in `parent`, and undoes the replacement of a folder."""
    files.remove_leftovers(parent, _LATEST)
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
    shutil.rmtree(work, ignore_errors=True)


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
