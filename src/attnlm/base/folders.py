"""Folders of data sets, runs and ladders: their names, locks, and the commands that use them.

Hints of errors show these commands, so this module knows their flags.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.formatting import listed
from attnlm.base.suggestions import suggestion

LATEST = "latest"
_LOCK = ".lock"
_SET_ASIDE = ".replaced-"


def _folder(variable: str, default: str) -> str:
    return os.path.expanduser(os.environ.get(variable) or default)  # noqa: PTH111 - never raises


# Read once: notebooks and scheduled jobs set them before they start Python.
DATA_DIR = _folder("ATTNLM_DATA_DIR", "data")
CHECKPOINT_DIR = _folder("ATTNLM_CHECKPOINT_DIR", "checkpoints")
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')

# For each kind of folder: a file that it contains, its default parent folder, the flag that names
# another root, and how to make one.
KINDS = {
    "run": ("config.json", CHECKPOINT_DIR, "--checkpoint-dir", "train one: attnlm train"),
    "ladder": ("ladder.json", CHECKPOINT_DIR, "--checkpoint-dir", "start one: attnlm ladder"),
    "exam": ("exam.json", CHECKPOINT_DIR, "--checkpoint-dir", "take one: attnlm exam"),
    "data set": ("meta.json", DATA_DIR, "--data-dir", "prepare one: attnlm prepare"),
}
# What to do with a thing of another kind: (the kind that is needed, that of the thing).
_INSTEAD = {
    ("run", "ladder"): "use the name of a rung, as in {}-bigram",
    ("run", "data set"): "train a run on it: attnlm train {}",
    ("run", "text"): "prepare it, then train: attnlm prepare {}",
    ("run", "model"): "make it a run: attnlm import {}",
    ("ladder", "run"): "name a ladder, or resume the run: attnlm train --resume {}",
    ("ladder", "data set"): "start a ladder on it: attnlm ladder {}",
    ("data set", "run"): "resume it: attnlm train --resume {}",
    ("data set", "ladder"): "resume it: attnlm ladder --resume {}",
    ("data set", "text"): "prepare it: attnlm prepare {}",
}


def is_safe_name(name: str) -> bool:
    """Return True if every system accepts this file name and attnlm does not reserve it."""
    return (
        0 < len(name.encode(errors="replace")) <= 120
        and name.lower() != LATEST
        and name.isprintable()
        and not name.startswith((".", "-", " "))
        and not name.endswith((".", " "))
        and not _FORBIDDEN.search(name)
    )


def check_name(name: str) -> None:
    """Raise UsageError if a name that the user chose can't be a folder's name."""
    if not is_safe_name(name):
        raise UsageError(
            f"`name` {name!r} is not a valid folder name on every system",
            "use letters, digits, - and _; 'latest' is reserved",
        )


def write_latest(root: Path, name: str) -> None:
    """Record which folder in `root` was made last."""
    files.write_bytes(root / LATEST, f"{name}\n".encode())


def default_name(root: Path, kind: str) -> str | None:
    """Return the name of the folder in `root` that commands use if none is named, or None.

    This is the folder that was made last or, if it is gone, the newest one.
    """
    names = folder_names(root, kind)
    with contextlib.suppress(AttnlmError):
        latest = files.read_bytes(root / LATEST).decode("utf-8", "replace").strip()
        if latest in names:
            return latest
    return names[0] if names else None


def find_folder(name: str | Path | None, root: Path, *, kind: str) -> Path:
    """Return the folder `name` in `root` or the folder at the path `name`; for None, the latest.

    Raises AttnlmError, whose hint lists existing names, if the folder does not exist.
    """
    put_back(root)
    if name is None:
        if (usual := default_name(root, kind)) is None:
            raise AttnlmError(f"there is no {kind} in {root} yet", how_to_make(kind, root))
        return root / usual
    if not isinstance(name, str | os.PathLike):
        raise UsageError(
            f"a {kind} cannot be of type {type(name).__name__}",
            f"pass a name, a path or an open {kind}",
        )
    if not str(name):
        raise UsageError(f"the name of a {kind} cannot be empty", f"name a {kind}, or leave it out")
    put_back(Path(name).parent)
    places = [Path(name)]
    if is_safe_name(str(name)):
        places.insert(0, root / name)
        places += [root.parent / usual / name for _, usual, _, _ in KINDS.values()]
    for place in places:
        other = _kind_at(place)
        if (kind, other) in _INSTEAD:
            hint = _INSTEAD[kind, other].format(shlex.quote(str(name)))
            raise AttnlmError(f"{name} is a {other}, not a {kind}", hint)
        if is_folder(place) and place in places[:2]:
            return place
    hint = how_to_make(kind, root)
    if names := folder_names(root, kind):
        verb = "are" if len(names) > 1 else "is"
        hint = suggestion(str(name), names, f"there {verb} {listed(names)}")
    raise AttnlmError(f"{kind} {str(name)!r} not found in {root}", hint)


def _kind_at(path: Path) -> str:
    """Return the kind of what is at a path: a key of KINDS, a model of another tool, or a text."""
    with contextlib.suppress(OSError):
        if path.suffix == ".safetensors" or (path / "generation_config.json").exists():
            return "model"
        for kind, (file, *_) in KINDS.items():
            if (path / file).exists():
                return kind
        if path.is_file():
            return "text"
    return ""


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder, False if not or if the system rejects the path."""
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or a parent folder may not be searched
        return False


def folder_names(root: Path, kind: str) -> list[str]:
    """Return the names of the folders of this kind in `root`, the newest first."""
    made = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            with contextlib.suppress(OSError):
                if is_safe_name(path.name):
                    made.append(((path / KINDS[kind][0]).stat().st_mtime_ns, path.name))
    return [name for _, name in sorted(made, reverse=True)]


def how_to_make(kind: str, root: Path) -> str:
    """Return a hint on how to make the first folder of this kind in `root`."""
    return " ".join([KINDS[kind][-1], *map(shlex.quote, folder_flag(root, kind))])


def folder_flag(root: Path, kind: str = "run") -> list[str]:
    """Return the flag, with its value, that makes commands look in `root`; [] for the default.

    The default depends on `kind`, and is relative to the current folder.
    """
    _, usual, flag, _ = KINDS[kind]
    return [] if root.absolute() == Path(usual).absolute() else [flag, str(root)]


def command_for(command: str, folder: Path, *flags: str, kind: str = "run") -> str:
    """Return a command about a run, ladder or data set, to type in the current folder.

    The command names the folder, unless commands use that folder by default: the latest one in the
    default root. Even then it is named if `command` ends with a flag that takes the name, such as
    `--resume`.
    """
    words = command.split()
    if not is_safe_name(folder.name):  # it can only be given by its path
        return shlex.join([*words, str(folder), *flags])
    place = folder_flag(folder.parent, kind)
    is_default = default_name(folder.parent, kind) == folder.name
    if place or words[-1].startswith("--") or not is_default:
        words.append(folder.name)
    return shlex.join([*words, *flags, *place])


def resume_command(run: Path) -> str:
    """Return the command that resumes a run."""
    return command_for("attnlm train --resume", run)


def flag(name: str) -> str:
    """Return the flag for a setting: `embed_dim` → `--embed-dim`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class FolderEntry:
    """An entry in a list of folders."""

    name: str
    path: Path
    bytes: int = 0
    """the size of all files in the folder; 0 for a link"""
    modified: float = 0.0
    """when it was last written or trained, in seconds since 1970"""
    link: str | None = None
    """the target, if `path` is a link"""
    is_latest: bool = False
    """True if commands use it when none is named"""
    problem: str | None = None
    """why it can't be read; None if it can"""


_Entry = TypeVar("_Entry", bound=FolderEntry)


def read_entry(
    entry: _Entry, dated_by: Sequence[str], read: Callable[[], Mapping[str, Any]]
) -> _Entry:
    """Return an entry with what `read` returns of its folder, or with the problem that it raises.

    `dated_by` are the names of the files that tell when the folder was last written.
    """
    path = entry.path
    link = str(path.readlink()) if path.is_symlink() else None
    times = [0.0]
    for name in dated_by:
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    size = 0
    if link is None:
        for root, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(OSError):
                    status = Path(root, name).lstat()
                    size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    entry = replace(entry, bytes=size, modified=max(times), link=link)
    try:
        return replace(entry, **read())
    except AttnlmError as error:
        return replace(entry, problem=error.message)
    except OSError as error:
        return replace(entry, problem=f"it cannot be read: {error.strerror}")


def newest_first(
    root: Path, entry_at: Callable[[Path], _Entry | None], kind: str, on_event: OnEvent | None
) -> list[_Entry]:
    """Return entries of folders in `root`, newest first. A Note names folders without an entry.

    Hidden folders, left by a running or killed command, are skipped.
    """
    try:
        paths = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AttnlmError(
            f"cannot read {root}: {error.strerror}", "check that it is a folder that you may read"
        ) from None
    entries = []
    others = []
    usual = default_name(root, kind)
    for path in paths:
        if not path.name.startswith(".") and (is_folder(path) or path.is_symlink()):
            if (entry := entry_at(path)) is None:
                others.append(path.name)
            else:
                entries.append(replace(entry, is_latest=path.name == usual))
    if others and on_event is not None:
        on_event(Note(f"skipped (not a {kind}): {', '.join(others)}"))
    return sorted(entries, key=lambda entry: (-entry.modified, entry.name))


# --- Exchanges, locks and the cache ---------------------------------------------------------------


def exchange_folders(new: Path, target: Path) -> None:
    """Swap the folder `new` of a workspace with the data set `target`; on errors, change nothing.

    A process that is killed halfway leaves the old folder under a hidden name, from which
    `put_back` puts it back.
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


def put_back(root: Path) -> None:
    """Put back, or else delete, the data sets in `root` that killed processes set aside."""
    for aside in root.glob(f"{_SET_ASIDE}{'[0-9a-f]' * 8}-?*"):
        target = aside.with_name(aside.name[len(_SET_ASIDE) + 9 :])
        with contextlib.suppress(OSError):
            if not (aside / KINDS["data set"][0]).is_file():
                continue  # not ours
            if not os.path.lexists(target):
                aside.rename(target)
            elif aside.is_symlink():
                aside.unlink()
            else:
                files.delete_folder(aside)


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


def cache_folder() -> Path | None:
    """Return $ATTNLM_CACHE_DIR or the user's cache folder; None if the user has no home folder."""
    import platformdirs

    try:
        named = os.environ.get("ATTNLM_CACHE_DIR") or platformdirs.user_cache_dir("attnlm")
        return Path(named).expanduser()
    except RuntimeError:
        return None


def writable_cache() -> Path | None:
    """Return `cache_folder`, created if it does not exist, or None if it can't be written."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder if os.access(folder, os.W_OK) else None
    return None
