"""What lies in the folder of runs or of data sets, whoever put it there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from attnlm.base.errors import AttnlmError
from attnlm.base.folders import is_folder
from attnlm.base.names import latest_name


class Entry(Protocol):
    """What a list tells of each: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def modified(self) -> float: ...
    @property
    def is_latest(self) -> bool: ...


_Entry = TypeVar("_Entry", bound=Entry)


def newest_first(
    parent: Path, entry_of: Callable[[Path], _Entry | None]
) -> tuple[list[_Entry], list[str]]:
    """What `entry_of` makes of each folder in `parent`, and the names of those it says None of.

    Raises AttnlmError where `parent` can't be read.
    """
    latest = ""
    with contextlib.suppress(AttnlmError, OSError):
        latest = latest_name(parent)
    entries, others = [], []
    for path in _folders_in(parent):
        entry = entry_of(path)
        if entry is None:
            others.append(path.name)
        else:
            entries.append(replace(entry, is_latest=path.name == latest))
    return sorted(entries, key=lambda entry: (-entry.modified, entry.name)), others


def _folders_in(parent: Path) -> list[Path]:
    """The folders in `parent`, and links in place of them, by name; none where it is missing.

    Hidden ones are left out: they are of commands that are at work, or were killed.
    """
    try:
        found = sorted(parent.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AttnlmError(
            f"can't read {parent}: {error.strerror}", "check that it is a folder and may be read"
        ) from None
    return [
        path
        for path in found
        if not path.name.startswith(".") and (is_folder(path) or path.is_symlink())
    ]


def link_target(path: Path) -> str | None:
    """What a link says that it leads to; None where `path` is none."""
    try:
        return str(path.readlink()) if path.is_symlink() else None
    except OSError:  # it is gone by now
        return None


def problem_of(path: Path) -> str | None:
    """Why nothing can be read in a folder, whatever it is; None where it can."""
    if not is_folder(path):
        return f"it is a link to {link_target(path)}, which is no folder"
    if not os.access(path, os.R_OK | os.X_OK):
        return "you have no permission to read it"
    return None


def folder_size(folder: Path) -> int:
    """The bytes of all files in a folder; links in it, and what can't be read, count nothing."""
    total, folders = 0, [str(folder)]  # not by recursion: they may be nested as deep as one likes
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(entry.path)
                    elif stat.S_ISREG(about.st_mode):
                        total += about.st_size
    return total


def modified(*paths: Path) -> float:
    """When the newest of these files was written, in seconds since 1970; 0 where there is none."""
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
