"""Names of folders that every system takes, and the newest of them."""

from __future__ import annotations

import re
from pathlib import Path

from attnlm.base import files
from attnlm.base.errors import UsageError

LATEST = "latest"
_LONGEST_LATEST = 2**10  # bytes
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')


def is_safe_name(name: str) -> bool:
    """Whether every system takes this as a file's name, and we do not need it ourselves."""
    return (
        0 < len(name.encode(errors="replace")) <= 120
        and name.lower() != LATEST
        and name.isprintable()
        and not name.startswith((".", "-", " "))
        and not name.endswith((".", " "))
        and not _FORBIDDEN.search(name)
        and not _RESERVED.fullmatch(name)
    )


def check_name(name: str) -> None:
    """Raises UsageError where a name that the user chose can't be a folder's."""
    if not is_safe_name(name):
        raise UsageError(
            f"`name` {name!r} can't be a folder's name on every system",
            "use letters, digits, - and _; 'latest' is taken",
        )


def write_latest(parent: Path, name: str) -> None:
    """Records which folder below `parent` was made last."""
    files.write_bytes(parent / LATEST, f"{name}\n".encode())


def latest_name(parent: Path) -> str:
    """The name of the folder below `parent` that was made last. Raises OSError without one."""
    return files.read_bytes(parent / LATEST, _LONGEST_LATEST).decode(errors="replace").strip()
