"""Attention for the terminal: blocks of colour where there is colour, lines of text elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from attnlm.see.attend import Attention, Numbers
from attnlm.see.text import visible
from attnlm.see.tint import tint

if TYPE_CHECKING:
    from rich.text import Text

_MOST_LISTED = 3


def in_colour(attention: Attention, width: int) -> Iterator[Text]:
    """One line after another, at most `width` columns wide.

    A head is a square, a row for each token that looks and a column for each that it looks at,
    as many heads side by side as fit. Where not even one fits, a head is one line that shows what
    the last token looks at.
    """
    from rich.text import Text

    count = len(attention.tokens)
    layers, heads = attention.weights.shape[:2]
    square = max(2 * count + 3, len(_name(layers - 1, heads - 1)))
    cells = [_cell(token) for token in attention.tokens]
    for layer, weights_HTT in enumerate(attention.weights):
        if 2 * count + 3 > width:
            for head, weights_TT in enumerate(weights_HTT):
                yield Text(f"{_name(layer, head)}, the last token")
                yield _row(cells, weights_TT[-1])
                yield Text()
            continue
        beside = max(1, (width + 2) // (square + 2))
        for first in range(0, heads, beside):
            row = range(first, min(first + beside, heads))
            yield Text("  ".join(f"{_name(layer, head):<{square}}" for head in row))
            for t, cell in enumerate(cells):
                rows = [
                    Text(f"{cell} ") + _row(cells[: t + 1], weights_HTT[head, t]) for head in row
                ]
                gap = " " * (square + 2 - rows[0].cell_len)
                yield Text(gap).join(rows)
            yield Text()


def _name(layer: int, head: int) -> str:
    return f"layer {layer + 1} head {head + 1}"


def _row(cells: list[str], weights_T: Numbers) -> Text:
    from rich.text import Text

    parts = zip(cells, weights_T.tolist(), strict=False)
    return Text.assemble(*((cell, tint(weight)) for cell, weight in parts))


def _cell(token: str) -> str:
    """The token's first two columns."""
    from rich.cells import set_cell_size

    return set_cell_size(visible(token), 2)


def in_words(attention: Attention) -> Iterator[str]:
    """For each head a line per token: what it looks at most, and with how much of its attention."""
    shown = [visible(token) for token in attention.tokens]
    widest = max(map(len, shown))
    for layer, weights_HTT in enumerate(attention.weights):
        for head, weights_TT in enumerate(weights_HTT):
            yield _name(layer, head)
            for t, weights_T in enumerate(weights_TT):
                most = np.argsort(-weights_T[: t + 1], kind="stable")[:_MOST_LISTED]
                looked_at = (f"{shown[s]}@{s} {weights_T[s]:.2f}" for s in most)
                yield f"  {t:>3} {shown[t]:<{widest}}  {'  '.join(looked_at)}"


def next_in_words(likeliest: Iterable[tuple[str, float]]) -> Iterator[str]:
    """What comes next: a line for each token, the likeliest first."""
    yield "next token"
    for token, probability in likeliest:
        yield f"  {probability:6.1%}  {visible(token)}"
