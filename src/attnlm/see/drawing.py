"""matplotlib, as all that draws has it: loaded late and quietly, in a style of our own."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from attnlm.base.errors import AttnlmError

# A font of theirs may have the letters that ours lacks.
_THE_USERS = ("backend", "font.family", "font.sans-serif")


@contextlib.contextmanager
def drawing(**style: object) -> Iterator[None]:
    """What is drawn meanwhile looks alike, whatever the user's own settings are.

    Raises AttnlmError where matplotlib finds no folder for its cache or can't read its settings.
    """
    # Where the home folder can't be written, matplotlib takes a temporary one and says too much.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib as mpl
        import matplotlib.font_manager
    except OSError as error:
        if error.filename is not None:
            raise
        raise AttnlmError(
            "matplotlib finds no folder that it can write to",
            "set MPLCONFIGDIR or TMPDIR to one",
        ) from error
    except ValueError as error:
        raise AttnlmError(
            f"matplotlib can't read its settings: {error}",
            "fix the file matplotlibrc, in this folder or in your home folder",
        ) from error
    ours: dict[Any, Any] = {**mpl.rcParamsDefault, **style}
    for name in _THE_USERS:
        del ours[name]
    with mpl.rc_context(ours), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield
