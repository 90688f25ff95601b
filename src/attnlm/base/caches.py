"""The user's cache folders, for downloads and for the code that PyTorch compiles."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path | None:
    """Return $ATTNLM_CACHE_DIR or the user's cache folder; None if the user has no home folder."""
    import platformdirs

    try:
        named = os.environ.get("ATTNLM_CACHE_DIR") or platformdirs.user_cache_dir("attnlm")
        return Path(named).expanduser()
    except RuntimeError:
        return None


def prepare_compiler() -> None:
    """Make PyTorch's compiler use a folder of this user as its cache, unless the user has set one.

    The compiler tests its output by `python -c`, which would import from the current folder.

    PyTorch's default is a folder in the temporary folder, which another user could have made. The
    folder is `compiled` in `cache_folder`, or in a new temporary folder if the cache can't be
    written. Each process must call this before it compiles.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if not os.environ.get(_COMPILER_CACHE):
        folder = (writable_cache() or Path(tempfile.mkdtemp())) / "compiled"
        folder.mkdir(0o700, exist_ok=True)
        os.environ[_COMPILER_CACHE] = str(folder)


def writable_cache() -> Path | None:
    """Return `cache_folder`, created if it does not exist, or None if it can't be written."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return folder if os.access(folder, os.W_OK) else None
    return None
