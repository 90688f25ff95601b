"""The user's cache folder, for downloads."""

from __future__ import annotations

import os
from pathlib import Path


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
