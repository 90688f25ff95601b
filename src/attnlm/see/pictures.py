"""Draw attention with matplotlib in a fixed style. The first drawing imports matplotlib."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnlm.see.attend import Attention, Numbers
from attnlm.see.heat_maps import HeatMaps
from attnlm.see.shown_tokens import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pixels = NDArray[np.uint8]
"""(height, width, 3)"""

# Keep the user's fonts, which may have letters that the default font lacks.
_USER_SETTINGS = ("backend", "font.family", "font.sans-serif")
_MOST_LABELS = 48  # tokens on an axis that are still legible
_LARGEST_SIDE = 30  # inches
_CELL = 6  # pixels per attention weight
_SIDE = 0.3  # inches per cell of a heat map
_MOST_ACROSS = 4  # heat maps in a row


@contextlib.contextmanager
def fixed_style(**style: object) -> Iterator[None]:
    """Set a fixed matplotlib style in a `with` block, keeping only the user's backend and fonts."""
    # Hide the warning that matplotlib uses a temporary folder if the home folder is read-only.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib as mpl
    import matplotlib.font_manager

    settings: dict[Any, Any] = {**mpl.rcParamsDefault, **style}
    for name in _USER_SETTINGS:
        if name not in style:
            del settings[name]
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def attention_picture(attention: Attention, format: str) -> bytes:
    """Return a PNG or SVG file (`format` is png or svg) with a row of maps for each layer.

    The bytes are reproducible.
    """
    layers, heads, length, _ = attention.weights.shape
    side = min(max(2.2, 0.16 * min(length, _MOST_LABELS)), _LARGEST_SIDE / max(layers, heads))
    shown = [_without_formulas(visible(token)) for token in attention.tokens]
    with _drawing_tokens(attention.tokens):
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        scale = LinearSegmentedColormap.from_list("share", ["#f3f6f9", "#2f80d8", "#08264a"])
        size = heads * side + 1.4, layers * side + 1.3
        figure = Figure(figsize=size, layout="constrained", dpi=120)
        grid = figure.subplots(layers, heads, squeeze=False)
        for (layer, head), axes in np.ndenumerate(grid):
            map_TT = attention.weights[layer, head]
            image = axes.imshow(map_TT, cmap=scale, vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {layer + 1} head {head + 1}", fontsize=8)
            axes.tick_params(labelsize=6)
            if length <= _MOST_LABELS:
                turn = 0 if max(map(len, shown)) == 1 else 90
                axes.set_xticks(range(length), shown, rotation=turn)
                axes.set_yticks(range(length), shown)
                axes.tick_params(length=0, pad=2)
        bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30)
        bar.set_label("attention weight", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        figure.supxlabel("key: the token that is attended to", fontsize=8)
        figure.supylabel("query: the token that attends", fontsize=8)
        return _figure_file(figure, format)


def heat_picture(maps: HeatMaps, format: str) -> bytes:
    """Return a PNG or SVG file (`format` is png or svg) with all heat maps.

    The bytes are reproducible.
    """
    grids = maps.grids
    across = len(grids) if len(grids) <= _MOST_ACROSS else _MOST_ACROSS - 1
    with _drawing_tokens([name for grid in grids for name in grid.rows]):
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure

        scale = LinearSegmentedColormap.from_list("share", ["#b3402a", "#f3f6f9", "#2f80d8"])
        wide = [len(grid.columns) * _SIDE + 1.5 for grid in grids[:across]]
        high = [len(grid.rows) * _SIDE + 1.2 for grid in grids[::across]]
        size = [min(inches, 4 * _LARGEST_SIDE) for inches in (sum(wide), max(high) * len(high))]
        figure = Figure(figsize=(size[0], size[1]), layout="constrained", dpi=120)
        places = figure.subplots(len(high), across, squeeze=False, width_ratios=wide)
        for axes, grid in zip(places.flat, grids, strict=True):
            axes.imshow(grid.values, cmap=scale, vmin=-1, vmax=1, interpolation="nearest")
            axes.set_anchor("N")
            axes.set_title(grid.title, fontsize=8)
            axes.set_xticks(range(len(grid.columns)), grid.columns)
            axes.set_yticks(range(len(grid.rows)), map(_without_formulas, grid.rows))
            axes.set_xlabel(grid.across, fontsize=7)
            axes.tick_params(length=0, pad=2, labelsize=6)
            for (y, x), share in np.ndenumerate(grid.values):
                axes.text(
                    x, y, f"{share:z.2f}", fontsize=5, ha="center", va="center", in_layout=False
                )
        figure.suptitle(_without_formulas(maps.captions[0]), fontsize=8)
        return _figure_file(figure, format)


def _without_formulas(text: str) -> str:
    """Return a text for matplotlib, in which a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


@contextlib.contextmanager
def _drawing_tokens(tokens: Iterable[str]) -> Iterator[None]:
    families, _ = find_fonts(tokens)
    with fixed_style(**{"svg.hashsalt": "attnlm", "svg.fonttype": "none", "font.family": families}):
        yield


def _figure_file(figure: Figure, format: str) -> bytes:
    file = io.BytesIO()
    metadata = {"Date": None} if format == "svg" else None
    figure.savefig(file, format=format, metadata=metadata, facecolor="white")
    return file.getvalue()


def find_fonts(tokens: Iterable[str]) -> tuple[list[str], str]:
    """Return the font families that draw tokens, and the characters that no installed font has.

    The user's families come first. Each further family is the installed font that has the most of
    the characters still missing.
    """
    with fixed_style():
        import matplotlib as mpl
        from matplotlib import font_manager

        families = list(mpl.rcParams["font.family"])
        properties = font_manager.FontProperties(family=families)
        missing = {ord(c) for token in tokens for c in visible(token)}
        missing -= _characters(font_manager.findfont(properties))
        while missing:
            drawn = {
                font.name: missing & _characters(font.fname)
                for font in font_manager.fontManager.ttflist
                if not font.name.startswith("Last Resort")
            }
            best = max(drawn, key=lambda name: len(drawn[name]))
            if not drawn[best]:
                break
            families.append(best)
            missing -= drawn[best]
    return families, "".join(map(chr, sorted(missing)))


@functools.cache
def _characters(path: str) -> frozenset[int]:
    from matplotlib import font_manager

    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):  # a damaged file
        return frozenset()


def maps_image(maps_LHTT: Numbers) -> Pixels:
    """Return all maps in one image: rows are layers, columns are heads, dark is a large weight."""
    lined = np.pad(maps_LHTT, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=0.3)
    layers, heads, side, _ = lined.shape
    joined = lined.transpose(0, 2, 1, 3).reshape(layers * side, heads * side)
    steps = np.rint(255 - 255 * joined).astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)
    return np.repeat(steps[..., None], 3, axis=2)
