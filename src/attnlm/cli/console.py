"""Print results on stdout and everything else on stderr, with colours only on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from attnlm.base.folders import flag
from attnlm.base.formatting import escape_control_characters
from attnlm.config.settings import RECORD_OF

if TYPE_CHECKING:
    from rich.console import Console

    from attnlm.workflows.doctor import Finding

_LABEL = 14  # characters of a finding's name
_NARROWEST = 9  # characters: a column of texts is not made narrower than this


def write(text: str) -> None:
    """Write a part of the result to stdout; on a terminal, with its control characters escaped."""
    sys.stdout.write(escape_control_characters(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_result(text: str) -> None:
    """Write a line of the result to stdout."""
    write(f"{text}\n")


def print_result_or_json(text: str, facts: Mapping[str, Any], json: bool) -> None:
    """Write the result: `facts` as a JSON object if `json` is True, else `text` as a line."""
    if json:
        print_json(facts)
    else:
        print_result(text)


def print_json(content: Mapping[str, Any]) -> None:
    """Write one JSON object on one line; paths become texts.

    Raises ValueError for NaN or infinity, which JSON lacks.
    """
    print_result(json.dumps(content, allow_nan=False, default=os.fspath))


def collect_findings(checks: Iterable[Finding], *, show: bool) -> list[Finding]:
    """Return all findings; if `show` is True, also print each when it comes."""
    results = []
    for finding in checks:
        results.append(finding)
        lines = [f"{finding.name:<{_LABEL}}{finding.text}"]
        if finding.remedy:
            lines.append(f"{'':<{_LABEL}}→ {finding.remedy}")
        for line in lines if show else []:
            print_result(escape_unprintable(with_flags(line)))
    return results


def has_colour() -> bool:
    """Return True if stdout is a terminal, and NO_COLOR and TERM allow colour."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def terminal(stream: TextIO, *, soft_wrap: bool = False) -> Console:
    """Return a rich console on the terminal `stream` to print texts as they are, without markup."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, soft_wrap=soft_wrap)


def say(text: str) -> None:
    """Print a line for the user on stderr; on a terminal it wraps at words."""
    say_styled("", "", text)


def say_facts(facts: Mapping[str, str]) -> None:
    """Print aligned lines `label  value`, with coloured labels; leave out empty values."""
    width = max(len(label) for label, value in facts.items() if value)
    for label, value in filter(all, facts.items()):
        say_styled(f"{label:<{width}}", "cyan", f"  {value}")


def say_styled(text: str, style: str, plain: str = "", *, unbroken: bool = False) -> None:
    """Print `text` in a style, then `plain`. If stderr is not a terminal, print both plain.

    If `unbroken` is True, no line breaks are printed in a long line: the terminal wraps it, and the
    user can copy it as one line.
    """
    if not sys.stderr.isatty():
        print(escape_unprintable(text + plain), file=sys.stderr, flush=True)  # noqa: T201
        return
    from rich.text import Text

    line = Text.assemble((escape_unprintable(text), style), escape_unprintable(plain))
    terminal(sys.stderr, soft_wrap=unbroken).print(line)


def say_aside(words: object) -> None:
    """Print a dimmed line, cut to the terminal's width; print nothing outside of a terminal."""
    if sys.stderr.isatty():
        from rich.text import Text

        line = Text(escape_unprintable(str(words)), "dim")
        terminal(sys.stderr).print(line, no_wrap=True, overflow="ellipsis")


def say_next(command: str, purpose: str = "") -> None:
    """Print the command to type next."""
    words = f"  {command}" + (f"  # {purpose}" if purpose else "")
    say_styled("next", "bold green", words, unbroken=True)


def fail(message: str, hint: str) -> None:
    """Print what went wrong, and what to do about it."""
    say_styled("error:", "bold red", f" {with_flags(message)}")
    say_styled("hint:", "bold yellow", f" {with_flags(hint)}")


def with_flags(text: str) -> str:
    """Return the text with settings written as options: `embed_dim` becomes --embed-dim.

    A word that is not an option of any command stays in its backticks.
    """
    return re.sub(r"`(\w+)`", lambda setting: _option_of_setting(setting[1]) or setting[0], text)


def _option_of_setting(name: str) -> str | None:
    """Return the option for a setting or another parameter, or None without an option."""
    if name in RECORD_OF:
        return flag(name)
    from attnlm.cli.app import option_of_each  # which imports this module

    return option_of_each().get(name)


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

    The columns named in `texts` are left-aligned, the others right-aligned. On a terminal, long
    titles and texts wrap, and what does not fit is cut off on the right.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        print(*table_lines(header, rows, texts), sep="\n", file=stream, flush=True)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = _columns(header, rows)
    for title, *cells in columns:
        widest = max(map(len, [*title.split(), *cells]))
        if title in texts:
            table.add_column(title, overflow="fold", min_width=min(widest, _NARROWEST))
        else:
            table.add_column(title, justify="right", width=widest)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*row)
    terminal(stream).print(table)


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a table without its empty columns."""
    aligned = [
        [f"{cell:{'<' if column[0] in texts else '>'}{max(map(len, column))}}" for cell in column]
        for column in _columns(header, rows)
    ]
    yield from ("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return each column that is not empty, with its title first."""
    columns = [[*map(escape_unprintable, column)] for column in zip(header, *rows, strict=True)]
    return [column for column in columns if any(column[1:])]
