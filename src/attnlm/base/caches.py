"""The user's cache folders, for downloads and for the code that PyTorch compiles."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from attnlm.base.errors import AttnlmError

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return the folder for downloads: $ATTNLM_CACHE_DIR or the user's cache folder.

    Return None when the system does not know the user's home folder.
    """
    import platformdirs

    try:
        named = os.environ.get("ATTNLM_CACHE_DIR") or platformdirs.user_cache_dir("attnlm")
        return Path(named).expanduser()
    except RuntimeError:
        return None


def code_folder() -> Path:
    """Make a folder for PyTorch's compiler that only this user may write to, and return its path.

    The folder is `compiled` in `cache_folder`, or a folder in the temporary folder if the cache is
    not suitable. A suitable folder is private, nobody else can replace it, and the system loads
    code from it. Raises AttnlmError if neither folder is suitable, and on Windows, whose
    permissions are different.
    """
    cache = cache_folder()
    places = [cache / "compiled"] if cache else []
    with contextlib.suppress(OSError):
        if sys.platform != "win32":
            places.append(Path(tempfile.gettempdir(), f"attnlm-compiled-{os.getuid()}"))
    for folder in places:
        with contextlib.suppress(OSError):
            folder.mkdir(0o700, parents=True, exist_ok=True)
            real = folder.parent.resolve() / folder.name
            about = real.lstat()
            is_ours = stat.S_ISDIR(about.st_mode) and is_ours_alone(about)
            is_usable = os.access(real, os.W_OK) and may_load_from(real)
            if is_ours and is_safe_parent(real.parent) and is_usable:
                return real
    raise AttnlmError(
        "found no private folder from which compiled code can run",
        f"set {_COMPILER_CACHE} to such a folder, or use `compile` off",
    )


def use_own_compiler_cache() -> None:
    """Make PyTorch's compiler use `code_folder` as its cache, unless the user has set another.

    PyTorch's default is a folder in the temporary folder, which another user could have made.
    Each process must call this before it compiles. Raises AttnlmError as `code_folder` does.
    """
    if sys.platform != "win32" and not os.environ.get(_COMPILER_CACHE):
        os.environ[_COMPILER_CACHE] = str(code_folder())


def may_load_from(folder: str | Path) -> bool:
    """Return True if the system loads code from this folder, False if it is mounted noexec."""
    if sys.platform == "win32":
        return False
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def is_safe_parent(folder: str | Path) -> bool:
    """Return True if no other user but root can replace what this user makes in this folder.

    The folder and all folders above it must belong to this user or to root, and each must be sticky
    or not writable by its group and others.
    """
    if sys.platform == "win32":
        return False
    real = Path(folder).resolve()
    for about in (path.lstat() for path in (*reversed(real.parents), real)):
        is_shared = about.st_mode & _OTHERS_WRITE and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.geteuid()) or is_shared:
            return False
    return True


def is_ours_alone(about: os.stat_result) -> bool:
    """Return True if a file or folder belongs to this user and nobody else may write to it."""
    if sys.platform == "win32":
        return False
    return about.st_uid == os.geteuid() and not about.st_mode & _OTHERS_WRITE
