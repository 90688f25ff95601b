"""What the command line prints: results on stdout, all else on stderr, bars only on a terminal."""

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

_FLAGS = {"start_from": "--from"}  # whose names differ
_NARROWEST = 8  # characters that a text is cut to at most
_BETWEEN = "  "


def write(text: str) -> None:
    """A piece of what was asked for; on a terminal nothing in it can take that over."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def result(text: str) -> None:
    """A line of what was asked for."""
    write(f"{text}\n")


def result_json(content: Mapping[str, Any]) -> None:
    """One object on one line. Raises ValueError for NaN and infinity, which JSON does not have."""
    result(json.dumps(content, allow_nan=False))


def has_colour() -> bool:
    """Whether stdout is a terminal whose reader wants colour."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def result_in_colour(parts: Callable[[int], Iterable[RenderableType]]) -> None:
    """Print parts of the result, made for the terminal's width."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    for part in parts(console.width):
        console.print(part)


def say(text: str) -> None:
    """A line for the person at the keyboard; on a terminal it wraps at words."""
    say_styled("", "", text)


def say_facts(facts: Mapping[str, str]) -> None:
    """Aligned lines `label  value`, the labels in colour on a terminal."""
    width = max(map(len, facts))
    for label, value in facts.items():
        say_styled(f"{label:<{width}}", "cyan", f"  {value}")


def say_styled(text: str, style: str, rest: str = "", *, unbroken: bool = False) -> None:
    """`text` in a style, `rest` plain; on anything but a terminal all plain.

    `unbroken`: the terminal wraps it, so that it can be copied as one line.
    """
    if not sys.stderr.isatty():
        print(one_line(text + rest), file=sys.stderr, flush=True)  # noqa: T201
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=unbroken)
    console.print(Text.assemble((one_line(text), style), one_line(rest)))


def say_aside(text: str) -> None:
    """A dimmed line on a terminal, cut to its width."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text(one_line(text), "dim"), no_wrap=True, overflow="ellipsis")


def say_next(command: str, about: str = "") -> None:
    """What to type after this."""
    words = f"  {command}" + (f"  # {about}" if about else "")
    say_styled("next", "bold green", words, unbroken=True)


def fail(message: str, hint: str) -> None:
    """What went wrong, and what to do about it."""
    say_styled("error:", "bold red", f" {one_line(with_flags(message))}")
    say_styled("hint:", "bold yellow", f" {one_line(with_flags(hint))}")


def with_flags(text: str) -> str:
    """Write the library's settings, such as `embed_dim`, as they are typed here: --embed-dim."""
    return re.sub(r"`(\w+)`", lambda name: _FLAGS.get(name[1], flag(name[1])), text)


def one_line(text: str) -> str:
    """With what is not printable escaped: names of files may hold anything."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def result_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str]
) -> None:
    """A table on stdout; the columns named in `texts` are to the left, numbers to the right.

    On a terminal long texts are cut to its width, and what then is too much on the right is left
    out. A pipe gets all of it.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in fitted(header, rows, texts, width):
        result(line)


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
        say(line)


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str], width: int | None
) -> Iterator[str]:
    """The lines of a table of at most `width` characters; None: of any."""
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
