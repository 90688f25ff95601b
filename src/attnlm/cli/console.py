"""Print results on stdout and everything else on stderr, with colours only on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from attnlm.base.formatting import escape_control_characters

if TYPE_CHECKING:
    from rich.console import Console

_NARROWEST = 9  # characters: a column of texts is not made narrower than this
OPTION_OF: dict[str, str] = {}
"""The option of each parameter of all commands, as in {"start_from": "--from"}. `cli.app` knows
the commands, and fills this."""


def write(text: str) -> None:
    """Write a part of the result to stdout; on a terminal, with its control characters escaped."""
    sys.stdout.write(escape_control_characters(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_result(text: str) -> None:
    """Write a line of the result to stdout."""
    write(f"{text}\n")


def print_json(content: Mapping[str, Any]) -> None:
    """Write one JSON object on one line; paths become texts.

    Raises ValueError for NaN or infinity, which JSON lacks.
    """
    print_result(json.dumps(content, allow_nan=False, default=os.fspath))


def print_result_or_json(text: str, facts: Mapping[str, Any], json: bool) -> None:
    """Write the result: `facts` as a JSON object if `json` is True, else `text` as a line."""
    if json:
        print_json(facts)
    else:
        print_result(text)


def terminal(stream: TextIO, *, soft_wrap: bool = False) -> Console:
    """Return a rich console that prints texts as they are; lines wrap only on a terminal."""
    from rich.console import Console

    width = None if stream.isatty() else sys.maxsize
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    return Console(file=stream, soft_wrap=soft_wrap, width=width, **plain)


def say(text: str, label: str = "", style: str = "", *, unbroken: bool = False) -> None:
    """Print a line for the user on stderr: a label in a style, then `text`.

    If `unbroken` is True, no line breaks are printed in a long line: the terminal wraps it, and the
    user can copy it as one line.
    """
    from rich.text import Text

    line = Text.assemble((escape_unprintable(label), style), escape_unprintable(text))
    terminal(sys.stderr, soft_wrap=unbroken or not sys.stderr.isatty()).print(line)


def say_facts(facts: Mapping[str, str]) -> None:
    """Print aligned lines `label  value`, with coloured labels; leave out empty values."""
    width = max(len(label) for label, value in facts.items() if value)
    for label, value in filter(all, facts.items()):
        say(f"  {value}", f"{label:<{width}}", "cyan")


def say_next(command: str, purpose: str = "") -> None:
    """Print the command to type next."""
    words = f"  {command}" + (f"  # {purpose}" if purpose else "")
    say(words, "next", "bold green", unbroken=True)


def fail(message: str, hint: str) -> None:
    """Print what went wrong, and what to do about it."""
    say(f" {with_flags(message)}", "error:", "bold red")
    say(f" {with_flags(hint)}", "hint:", "bold yellow")


def with_flags(text: str) -> str:
    """Return the text with settings written as options: `embed_dim` becomes --embed-dim.

    A word that is not an option of any command stays in its backticks.
    """
    return re.sub(r"`(\w+)`", lambda word: OPTION_OF.get(word[1], word[0]), text)


def escape_unprintable(text: str) -> str:
    """Return the text with unprintable characters escaped, since file names may contain them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Sequence[str],
    stream: TextIO | None = None,
) -> None:
    """Print a table without its empty columns, on stdout by default.

    The columns named in `texts` are left-aligned, the others right-aligned. On a terminal, titles
    and long texts wrap.
    """
    from rich.table import Table

    console = terminal(stream or sys.stdout)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = [c for c in zip(header, *rows, strict=True) if any(c[1:])]
    for title, *cells in columns:
        widest = max(map(len, [*title.split(), *cells]))
        if title in texts:
            table.add_column(title, overflow="fold", min_width=min(widest, _NARROWEST))
        else:
            width = widest if console.is_terminal else None
            table.add_column(title, justify="right", width=width)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(escape_unprintable, row))
    with console.capture() as shown:
        console.print(table)
    lines = (line.rstrip() for line in shown.get().splitlines())
    print(*lines, sep="\n", file=stream or sys.stdout, flush=True)
