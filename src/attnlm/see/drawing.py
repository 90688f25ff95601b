"""matplotlib, as all that draws has it: loaded late and quietly, in a style of our own."""

from __future__ import annotations

import contextlib
import functools
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
        if name not in style:
            del ours[name]
    with mpl.rc_context(ours), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def fonts_for(text: str) -> tuple[list[str], str]:
    """Return the font families that draw a text, and the characters that no installed font has.

    The user's own family comes first, then the fonts that have most of what is still missing.
    """
    with drawing():
        import matplotlib as mpl
        from matplotlib import font_manager

        families = list(mpl.rcParams["font.family"])
        usual = font_manager.FontProperties(family=families)
        missing = {ord(c) for c in text} - _characters(font_manager.findfont(usual))
        while missing:
            installed = font_manager.fontManager.ttflist
            found = {font.name: missing & _characters(font.fname) for font in installed}
            found = {name: has for name, has in found.items() if not name.startswith("Last Resort")}
            best = max(found, key=lambda name: len(found[name]))
            if not found[best]:
                break
            families.append(best)
            missing -= found[best]
    return families, "".join(map(chr, sorted(missing)))


@functools.cache
def _characters(path: str) -> frozenset[int]:
    from matplotlib import font_manager

    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):  # a damaged file
        return frozenset()
