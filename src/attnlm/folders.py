"""Data sets and runs by name, the one made last, and the folder of a user's caches."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from attnlm import files
from attnlm.errors import AttnlmError, UsageError

_LATEST = "latest"
_LONGEST_LATEST = 2**10  # bytes
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
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

    Raises AttnlmError, with names that come near, when there is none.
    """
    if name is None:
        return _latest(parent, kind, hint)
    below = parent / name
    if is_safe_name(str(name)) and is_folder(below):
        return below
    if is_folder(Path(name)):
        return Path(name)
    near = difflib.get_close_matches(str(name), _names(parent), n=1)
    raise AttnlmError(
        f"no {kind} is called {str(name)!r} in {parent}",
        f"did you mean {near[0]}?" if near else hint,
    )


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


def cache_folder() -> Path | None:
    """For downloads and timings: `ATTNLM_CACHE_DIR`, or the system's place for a user's caches.

    None where the user has no home folder that the system knows of.
    """
    import platformdirs

    try:
        named = os.environ.get("ATTNLM_CACHE_DIR") or platformdirs.user_cache_dir("attnlm")
        return Path(named).expanduser()
    except RuntimeError:
        return None
