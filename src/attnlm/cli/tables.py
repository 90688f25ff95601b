"""Tables: of what is asked for, made to fit the terminal, and of what is told beside it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from attnlm.cli import console

_NARROWEST = 8  # characters that a text is cut to at most
_BETWEEN = "  "


def result_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str]
) -> None:
    """A table on stdout; the columns named in `texts` are to the left, numbers to the right.

    On a terminal long texts are cut to its width, and what then is too much on the right is left
    out. A pipe gets all of it.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in fitted(header, rows, texts, width):
        console.result(line)


def say_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their header, the first column to the left and numbers to the right."""
    if sys.stderr.isatty():
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        drawn = Table(box=SIMPLE)
        drawn.add_column(header[0], overflow="fold")  # which has the width that numbers leave
        for title, *cells in list(zip(header, *rows, strict=True))[1:]:
            widest = max(map(len, [*title.split(), *cells]))
            drawn.add_column(title, justify="right", width=widest)
        for row in rows:
            drawn.add_row(*row)
        Console(stderr=True, highlight=False).print(drawn)
        return
    for line in fitted(header, rows, header[:1], None):
        console.say(line)


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str], width: int | None
) -> Iterator[str]:
    """The lines of a table of at most `width` characters; None: of any."""
    table = [list(header), *([console.one_line(cell) for cell in row] for row in rows)]
    filled = [i for i in range(len(header)) if any(row[i] for row in table[1:])]
    widths = {i: max(len(row[i]) for row in table) for i in filled}
    if width is not None:
        _narrow(widths, [i for i in widths if header[i] in texts], width)
    for row in table:
        cells = (
            f"{_cut(row[i], size):<{size}}" if header[i] in texts else f"{row[i]:>{size}}"
            for i, size in widths.items()
        )
        yield _BETWEEN.join(cells).rstrip()


def _narrow(widths: dict[int, int], texts: Sequence[int], width: int) -> None:
    """Narrows the widest of the texts by and by, the first column last, then drops columns from
    the right."""

    def excess() -> int:
        return sum(widths.values()) + len(_BETWEEN) * (len(widths) - 1) - width

    while excess() > 0:
        wide = [i for i in texts if widths.get(i, 0) > _NARROWEST]
        if wide:
            widths[max(wide, key=lambda i: (i > 0, widths[i]))] -= 1
        elif len(widths) > 1:
            del widths[max(widths)]
        else:
            return


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"
