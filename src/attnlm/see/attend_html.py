"""Attention as a notebook shows it: a shaded grid for each head, in plain HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from attnlm.see.attend import Attention, Numbers
from attnlm.see.text import visible

_MOST_CELLS = 4000  # of all grids together: about 250 kB
_NUMBERED = 24  # tokens; the cells of a longer text have no numbers
_TABLE = "border-collapse:collapse;font:11px monospace;text-align:center"


def attention_html(attention: Attention) -> str:
    """A grid for each head, as long as there is room: rows look at columns; then the likeliest
    next tokens."""
    layers, heads, length, _ = attention.weights.shape
    fitting = _MOST_CELLS // (length * (length + 1) // 2)
    shown = [visible(token) for token in attention.tokens]
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    grids = "".join(
        '<div style="display:inline-block;vertical-align:top;margin:0 1em 1em 0">'
        f"<div>layer {layer + 1} head {head + 1}: <code>weights[{layer}, {head}]</code></div>"
        f"{_grid(attention.weights[layer, head], shown)}</div>"
        for layer, head in places[:fitting]
    )
    left = len(places) - fitting
    more = f"<div>{left:,} more in <code>weights</code>, (L, H, T, T)</div>" if left > 0 else ""
    likeliest = ", ".join(f"{escape(visible(t))} {p:.2f}" for t, p in attention.next_tokens(-1, 5))
    return (
        f"<div><div>{escape(attention.run)}: rows look at columns; in percent</div>"
        f"{grids}{more}<div>next token: {likeliest}</div></div>"
    )


def _grid(weights_TT: Numbers, shown: list[str]) -> str:
    """The lower triangle of one head, darker for more."""
    labels = [f"<th>{escape(token)}</th>" for token in shown]
    rows = "".join(
        f"<tr>{label}{''.join(_cells(weights_TT[t, : t + 1].tolist(), len(shown)))}</tr>"
        for t, label in enumerate(labels)
    )
    return f'<table style="{_TABLE}"><tr><td></td>{"".join(labels)}</tr>{rows}</table>'


def _cells(row: list[float], length: int) -> Iterator[str]:
    for weight in row:
        number = f"{100 * weight:.0f}" if length <= _NUMBERED and weight >= 0.005 else ""
        yield f'<td style="background:rgba(47,128,216,{weight:.2f})">{number}</td>'
