"""What lies in the folder of runs or of data sets, whoever put it there."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.folders import is_folder


def entries_in(parent: Path) -> list[Path]:
    """The folders in `parent`, and links in place of them, by name; none where it is missing.

    Hidden ones are left out: they are of commands that are at work, or were killed. Raises
    AttnlmError where `parent` can't be read.
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
        return "it may not be read"
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
