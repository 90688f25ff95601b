"""A user's caches: where downloads, timings and compiled code are kept."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from attnlm.base.errors import AttnlmError


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


def code_folder() -> Path:
    """For compiled code, to be loaded again: a folder that nobody else may write to.

    In the cache, else in the temporary folder. Raises AttnlmError where it can be in neither.
    """
    cache = cache_folder()
    places = [cache / "compiled"] if cache else []
    with contextlib.suppress(OSError):
        places.append(Path(tempfile.gettempdir(), f"attnlm-compiled-{os.getuid()}"))
    for folder in places:
        with contextlib.suppress(OSError):
            folder.mkdir(0o700, parents=True, exist_ok=True)
            if _is_ours_alone(folder) and may_load_from(folder):
                return folder.absolute()
    raise AttnlmError(
        "compiled code needs a folder that is yours alone and that programs may be loaded from",
        "let TORCHINDUCTOR_CACHE_DIR name one, or give `compile` off",
    )


def may_load_from(folder: str | Path) -> bool:
    """Whether the system loads code from there: not where it is mounted noexec."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def _is_ours_alone(folder: Path) -> bool:
    about = folder.lstat()
    others_write = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not others_write
    return is_ours and os.access(folder, os.W_OK)
