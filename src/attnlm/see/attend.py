"""Compute what each head of a run attends to in a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import record, require_attention
from attnlm.runs.journal import packed_maps
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.pictures import Grid, Numbers, Pictured
from attnlm.see.shown_tokens import ids_within_context, token_texts, visible

_MOST_LISTED = 3
_MOST_PACKED = 3_000_000  # bytes of recorded attention in a page

CAUTION = (
    "Weights are not an explanation: they show where a head reads, "
    "not what it reads there or what the model makes of it."
)


@dataclass(frozen=True, repr=False)
class Attention(Pictured):
    """Every head's attention weights over T tokens. A notebook shows a map of each head."""

    model: str
    tokens: list[str]
    weights: Numbers
    """(L layers, H heads, T, T): row t has the weights of token t on the tokens up to itself"""

    def __str__(self) -> str:
        """Return a line for each head and token, with its largest weights."""
        shown = [visible(token) for token in self.tokens]
        widest = max(map(len, shown))
        lines = []
        for layer, head in np.ndindex(*self.weights.shape[:2]):
            lines.append(f"layer {layer + 1} head {head + 1}")
            for t, row_T in enumerate(self.weights[layer, head]):
                places = likeliest(row_T[: t + 1], _MOST_LISTED)
                weights = "  ".join(f"{shown[s]}@{s} {row_T[s]:.2f}" for s in places)
                lines.append(f"  {t:>3} {shown[t]:<{widest}}  {weights}")
        return "\n".join(lines)

    @property
    def title(self) -> str:
        return f"What {self.run} attends to: a row for each token that attends"

    @property
    def in_a_row(self) -> int:
        return len(self.weights[0])

    @property
    def grids(self) -> list[Grid]:
        """The weights as a table for each head: a row attends, a column is attended to."""
        names = [visible(token) for token in self.tokens]
        future_TT = ~np.tri(len(names), dtype=bool)
        return [
            Grid(
                f"layer {layer + 1} head {head + 1}",
                names,
                names,
                np.where(future_TT, np.float32(np.nan), self.weights[layer, head]),
                "key: the token that is attended to",
            )
            for layer, head in np.ndindex(*self.weights.shape[:2])
        ]


def likeliest(scores_V: NDArray[Any], count: int) -> list[int]:
    """Return the ids of the `count` largest scores in descending order; ties by ascending id."""
    ids: list[int] = np.argsort(-scores_V, kind="stable")[:count].tolist()
    return ids


def attend(
    text: str,
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
) -> Attention:
    """Compute what each head of a run (default: the one trained last) attends to in `text`.

        attention = attnlm.attend("Once upon", "multi-head-001")
        attention.tokens  # T texts
        attention.weights[0, 1]  # (T, T), layer 1, head 2: each row sums to 1

    `checkpoint` is auto, best or last. Runs on the CPU. Raises AttnlmError if the text does not fit
    the context or the vocabulary, for missing or damaged files, for numbers that are not finite,
    for a bigram, which has no attention, and for a class of your own that does not record its
    attention.
    """
    run = open_run(run)
    require_attention(run.config.spec)
    ids = ids_within_context(run, text)
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    return compute_attention(run, model, ids)


def compute_attention(run: Run, model: LanguageModel, ids: list[int]) -> Attention:
    """Run a forward pass over `ids`; return its attention.

    Raises NotRecordedError if not every layer recorded its maps, and NotFiniteError for NaN and
    infinity.
    """
    recorder = record(model, torch.tensor([ids]))
    check_finite(recorder.logits)
    return Attention(
        run=run.name,
        model=run.config.spec.name,
        tokens=token_texts(run.tokenizer, ids),
        weights=recorder.maps[:, 0].numpy(),
    )


def packed_attention(attention: Attention) -> dict[str, Any]:
    """Return the JSON values of recorded attention. Of a long text, the page has the beginning."""
    layers, heads = attention.weights.shape[:2]
    length = min(len(attention.tokens), math.isqrt(2 * _MOST_PACKED // (layers * heads)))
    tokens = [visible(token) for token in attention.tokens[:length]]
    maps = packed_maps(attention.weights[..., :length, :length])
    return {"tokens": tokens, "layers": layers, "heads": heads, "maps": maps}
