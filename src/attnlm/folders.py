"""Data sets and runs: found by name, put in place whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnlm import files
from attnlm.errors import AttnlmError, UsageError
from attnlm.locks import clear, is_ours, locked, locked_new
from attnlm.suggestions import suggestion

_LATEST = "latest"
_WORKSPACE, _ASIDE = ".unfinished-", "old-"
_LONGEST_LATEST = 2**10  # bytes
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MOST_NAMED = 5
# Of each kind of folder: a file that it has, the folder that it lies in by default, the flag that
# names another, and how one is made.
_KINDS = {
    "run": ("config.json", "checkpoints", "--checkpoint-dir", "train one: attnlm train"),
    "ladder": ("ladder.json", "checkpoints", "--checkpoint-dir", "begin one: attnlm ladder"),
    "data set": ("meta.json", "data", "--data-dir", "prepare one: attnlm prepare"),
}
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
    below = parent / name
    if is_safe_name(str(name)) and is_folder(below):
        return below
    if is_folder(Path(name)):
        return Path(name)
    hint = how_to_make(kind, parent)
    if names := _names(parent, kind):
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        hint = suggestion(str(name), names, f"there is {', '.join(names[:_MOST_NAMED])}{more}")
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


def _latest(parent: Path, kind: str) -> Path:
    if not (parent / _LATEST).exists():
        raise AttnlmError(f"there is no {kind} in {parent} yet", how_to_make(kind, parent))
    name = _latest_name(parent)
    if not is_safe_name(name) or not (parent / name).is_dir():
        names = _names(parent, kind)
        raise AttnlmError(
            f"the latest {kind}, {name!r}, is no longer in {parent}",
            f"name one: {', '.join(names[:_MOST_NAMED])}" if names else how_to_make(kind, parent),
        )
    return parent / name


def _latest_name(parent: Path) -> str:
    return files.read_bytes(parent / _LATEST, _LONGEST_LATEST).decode(errors="replace").strip()


def _names(parent: Path, kind: str) -> list[str]:
    """Of the folders of that kind below `parent`, the newest first."""
    made = []
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            with contextlib.suppress(OSError):
                if is_safe_name(path.name):
                    made.append(((path / _KINDS[kind][0]).stat().st_mtime_ns, path.name))
    return [name for _, name in sorted(made, reverse=True)]


def how_to_make(kind: str, parent: Path) -> str:
    """A hint at how to make the first folder of that kind in `parent`."""
    return " ".join([_KINDS[kind][-1], *map(shlex.quote, elsewhere(parent, kind))])


def elsewhere(parent: Path, kind: str = "run") -> list[str]:
    """The flag that says that things of that kind lie in `parent`; none where that is the default.

    `parent` is compared with the default folder as both are seen from the current one.
    """
    _, usual, flag, _ = _KINDS[kind]
    return [] if parent.absolute() == Path(usual).absolute() else [flag, str(parent)]


def command_for(
    command: str, folder: Path, *flags: str, kind: str = "run", named: bool = False
) -> str:
    """A command about a run, ladder or data set, as one types it in the current folder.

    The newest in the default folder has no name, unless `named` or where the command ends in a
    flag that needs one.
    """
    words = command.split()
    if not is_safe_name(folder.name):  # it can only be given by its path
        return shlex.join([*words, str(folder), *flags])
    place = elsewhere(folder.parent, kind)
    if named or place or words[-1].startswith("--") or not _is_latest(folder):
        words.append(folder.name)
    return shlex.join([*words, *flags, *place])


def _is_latest(folder: Path) -> bool:
    try:
        return _latest_name(folder.parent) == folder.name
    except (AttnlmError, OSError):
        return False


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
