"""Print results on stdout and everything else on stderr; show bars only on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnlm.base.folders import flag
from attnlm.base.readable import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

_FLAGS = {"start_from": "--from"}  # options not named after their setting
_NARROWEST = 8  # characters: a column of texts is not cut below this width
_BETWEEN = "  "


def write(text: str) -> None:
    """Write a part of the result to stdout; on a terminal, with its control characters escaped."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def result(text: str) -> None:
    """Write a line of the result to stdout."""
    write(f"{text}\n")


def result_json(content: Mapping[str, Any]) -> None:
    """Write one JSON object on one line. Raises ValueError for NaN or infinity: JSON lacks them."""
    result(json.dumps(content, allow_nan=False))


def has_colour() -> bool:
    """Return True if stdout is a terminal, and NO_COLOR and TERM allow colour."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def result_in_colour(parts: Callable[[int], Iterable[RenderableType]]) -> None:
    """Print the parts of the result that `parts` makes for the terminal's width."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    for part in parts(console.width):
        console.print(part)


def say(text: str) -> None:
    """Print a line for the user on stderr; on a terminal it wraps at words."""
    say_styled("", "", text)


def say_facts(facts: Mapping[str, str]) -> None:
    """Print aligned lines `label  value`, with coloured labels on a terminal."""
    width = max(map(len, facts))
    for label, value in facts.items():
        say_styled(f"{label:<{width}}", "cyan", f"  {value}")


def say_styled(text: str, style: str, rest: str = "", *, unbroken: bool = False) -> None:
    """Print `text` in a style and `rest` plain; without a terminal, print both plain.

    With `unbroken` the terminal itself wraps the line, so that it can be copied as one line.
    """
    if not sys.stderr.isatty():
        print(one_line(text + rest), file=sys.stderr, flush=True)  # noqa: T201
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=unbroken)
    console.print(Text.assemble((one_line(text), style), one_line(rest)))


def say_aside(text: str) -> None:
    """Print a dimmed line, cut to the width of the terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(one_line(text), "dim"), no_wrap=True, overflow="ellipsis")


def say_next(command: str, about: str = "") -> None:
    """Print the command to type next."""
    words = f"  {command}" + (f"  # {about}" if about else "")
    say_styled("next", "bold green", words, unbroken=True)


def fail(message: str, hint: str) -> None:
    """Print what went wrong, and what to do about it."""
    say_styled("error:", "bold red", f" {one_line(with_flags(message))}")
    say_styled("hint:", "bold yellow", f" {one_line(with_flags(hint))}")


def with_flags(text: str) -> str:
    """Return the text with settings written as options: `embed_dim` becomes --embed-dim."""
    return re.sub(r"`(\w+)`", lambda name: _FLAGS.get(name[1], flag(name[1])), text)


def one_line(text: str) -> str:
    """Return the text with unprintable characters escaped: file names may hold any."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def result_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str]
) -> None:
    """Print a table on stdout, with the columns named in `texts` left-aligned, others right.

    On a terminal, long texts are cut to fit its width, then columns that do not fit are dropped
    from the right. A pipe gets the whole table.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in fitted(header, rows, texts, width):
        result(line)


def say_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stderr, with the first column left-aligned and numbers right-aligned."""
    if sys.stderr.isatty():
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        drawn = Table(box=SIMPLE)
        drawn.add_column(header[0], overflow="fold")  # it gets the width that the numbers leave
        for title, *cells in list(zip(header, *rows, strict=True))[1:]:
            widest = max(map(len, [*title.split(), *cells]))
            drawn.add_column(title, justify="right", width=widest)
        for row in rows:
            drawn.add_row(*row)
        Console(stderr=True, highlight=False).print(drawn)
        return
    for line in fitted(header, rows, header[:1], None):
        say(line)


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str], width: int | None
) -> Iterator[str]:
    """Yield the lines of a table at most `width` characters wide; None sets no limit."""
    table = [list(header), *([one_line(cell) for cell in row] for row in rows)]
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
    """Narrow the widest column of texts until the table fits, the first column last; then drop
    columns from the right."""

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
