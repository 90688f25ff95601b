"""Tables of numbers from −1 to 1, as text and as pictures. A picture imports matplotlib."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnlm.see.shown_tokens import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float32]

# Keep the user's fonts, which may have letters that the default font lacks.
_USER_SETTINGS = ("backend", "font.family", "font.sans-serif")
_COLOURS = ("#5c1608", "#c2553c", "#f3f6f9", "#2f80d8", "#08264a")  # from −1 to 1
_CHARACTERS = 6  # of a number in a table of text
_MOST_NUMBERS = 550  # in a picture; with more cells, it shows colours only
_MOST_LABELS = 48  # rows or columns whose names are still legible
_CELL, _SMALL_CELL = 0.23, 0.16  # inches, with and without a number
_LARGEST_SIDE = 100  # inches of a picture


@dataclass(frozen=True)
class Grid:
    """A table of numbers, with a name for each of R rows and C columns."""

    title: str
    rows: list[str]
    columns: list[str]
    values: Numbers
    """(R, C); NaN for a cell without a number"""
    across: str
    """the kind of the columns, such as layer"""


@dataclass(frozen=True, repr=False)
class Pictured(ABC):
    """What was found in a run, with tables: a notebook shows them as a picture."""

    run: str

    @property
    @abstractmethod
    def title(self) -> str:
        """A line above the tables."""

    @property
    @abstractmethod
    def grids(self) -> list[Grid]:
        """The result as tables."""

    @property
    def in_a_row(self) -> int:
        """The number of tables beside each other in a picture."""
        return 4

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.run!r}>"

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}

    def __str__(self) -> str:
        """Return a table of numbers for each grid."""
        lines = []
        for grid in self.grids:
            start = max(map(len, [grid.title, *grid.rows]))
            names = "".join(f"{name:>{_CHARACTERS}}" for name in grid.columns)
            lines.append(f"{grid.title:<{start}}{names}")
            for name, numbers in zip(grid.rows, grid.values.tolist(), strict=True):
                lines.append(f"{name:<{start}}{''.join(f'{x:z{_CHARACTERS}.2f}' for x in numbers)}")
        return "\n".join(lines)

    def picture(self, format: str = "png") -> bytes:
        """Return a PNG or SVG file (`format` is png or svg), with the same bytes each time."""
        grids = self.grids
        across = min(len(grids), self.in_a_row)
        down = -(-len(grids) // across)
        has_numbers = sum(grid.values.size for grid in grids) <= _MOST_NUMBERS
        cell = _CELL if has_numbers else _SMALL_CELL
        wide = 1.2 + cell * min(max(len(grid.columns) for grid in grids), _MOST_LABELS)
        high = 1.0 + cell * min(max(len(grid.rows) for grid in grids), _MOST_LABELS)
        size = min(across * wide, _LARGEST_SIDE), min(down * high, _LARGEST_SIDE)
        with fixed_style(**{"svg.hashsalt": "attnlm", "svg.fonttype": "none"}):
            from matplotlib.colors import LinearSegmentedColormap
            from matplotlib.figure import Figure

            colours = LinearSegmentedColormap.from_list("share", _COLOURS)
            figure = Figure(figsize=size, layout="constrained", dpi=120)
            places = figure.subplots(down, across, squeeze=False).flat
            for grid, axes in itertools.zip_longest(grids, places):
                axes.set_visible(grid is not None)
                if grid is not None:
                    axes.imshow(grid.values, cmap=colours, vmin=-1, vmax=1)
                    _label(axes, grid, has_numbers)
            figure.suptitle(_plain(self.title), fontsize=8)
            file = io.BytesIO()
            metadata = {"Date": None} if format == "svg" else None
            figure.savefig(file, format=format, metadata=metadata, facecolor="white")
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.picture()


def _plain(text: str) -> str:
    """Return a text for matplotlib, in which a dollar sign would begin a formula."""
    return visible(text).replace("␣", " ").replace("$", r"\$")


def _label(axes: Axes, grid: Grid, has_numbers: bool) -> None:
    axes.set_anchor("N")
    axes.set_title(_plain(grid.title), fontsize=8)
    axes.set_xlabel(grid.across, fontsize=7)
    axes.tick_params(length=0, pad=2, labelsize=6)
    if len(grid.columns) <= _MOST_LABELS:
        turn = 90 if max(map(len, grid.columns)) > 3 else 0
        names = [name.replace("$", r"\$") for name in grid.columns]
        axes.set_xticks(range(len(names)), names, rotation=turn)
    if len(grid.rows) <= _MOST_LABELS:
        axes.set_yticks(range(len(grid.rows)), [name.replace("$", r"\$") for name in grid.rows])
    for (y, x), number in np.ndenumerate(grid.values):
        if has_numbers and not np.isnan(number):
            style: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
            colour = "white" if abs(number) > 0.6 else "black"
            axes.text(x, y, f"{number:z.2f}", fontsize=5, color=colour, **style)


@contextlib.contextmanager
def fixed_style(**style: object) -> Iterator[None]:
    """Set a fixed matplotlib style in a `with` block, keeping only the user's backend and fonts."""
    # Hide the warning that matplotlib uses a temporary folder if the home folder is read-only.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib as mpl

    settings: dict[Any, Any] = {**mpl.rcParamsDefault, **style}
    for name in _USER_SETTINGS:
        del settings[name]
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield
