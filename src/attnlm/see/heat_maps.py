"""Heat maps: tables of numbers from −1 to 1, as plain text, on a terminal, or as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlm.see.attend import Numbers
from attnlm.see.shown_tokens import tint

if TYPE_CHECKING:
    from rich.columns import Columns

_CELL, _NARROW = 6, 2  # characters, with and without a number


@dataclass(frozen=True)
class Grid:
    """A table of numbers, with a name for each of R rows and C columns."""

    title: str
    rows: list[str]
    columns: list[str]
    values: Numbers
    """(R, C)"""
    across: str
    """the kind of the columns, such as layer"""


@dataclass(frozen=True)
class HeatMaps:
    """Tables, with a title and captions."""

    title: str
    captions: list[str]
    grids: list[Grid]

    def __str__(self) -> str:
        """Return a table of numbers for each grid."""
        lines = []
        for grid in self.grids:
            start = max(map(len, [grid.title, *grid.rows]))
            lines.append(f"{grid.title:<{start}}{''.join(f'{c:>{_CELL}}' for c in grid.columns)}")
            for name, numbers in zip(grid.rows, grid.values.tolist(), strict=True):
                lines.append(f"{name:<{start}}{''.join(f'{x:z{_CELL}.2f}' for x in numbers)}")
        return "\n".join(lines)

    def in_colour(self, width: int) -> Columns:
        """Return coloured tables for a terminal of `width` columns; wide ones show no numbers."""
        from rich.cells import set_cell_size
        from rich.columns import Columns
        from rich.text import Text

        tables = []
        for grid in self.grids:
            start = max(map(len, grid.rows))
            fits = start + _CELL * len(grid.columns) <= width
            cell = _CELL if fits else _NARROW
            table = Text(f"{grid.title}\n{'':<{start}}", no_wrap=True)
            table.append("".join(set_cell_size(f" {name}"[-cell:], cell) for name in grid.columns))
            for name, numbers in zip(grid.rows, grid.values.tolist(), strict=True):
                table.append(f"\n{name:<{start}}")
                for x in numbers:
                    shown = f"{x:z{_CELL - 1}.2f} " if fits else ""
                    table.append(f"{shown:<{cell}}", tint(max(-1.0, min(x, 1.0))))
            tables.append(table.append("\n"))
        return Columns(tables, padding=(0, 1))

    def page(self) -> bytes:
        """Return an HTML page, in UTF-8."""
        from attnlm.see.page import render

        return render("heat_maps.html", maps=self)
