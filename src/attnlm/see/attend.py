"""Compute what each head of a run attends to in a text, and the likeliest next tokens.

The results hold arrays. They can be shown on a terminal, in a pipe and in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import NotRecordedError, Recorder, no_attention_error, record
from attnlm.model.spec import Use
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.shown_tokens import encode_text, tint, token_texts, visible

if TYPE_CHECKING:
    from rich.columns import Columns

Numbers = NDArray[np.float32]

_MOST_IN_JSON = 2**24  # numbers, about 400 MB as JSON
_MOST_CELLS = 4000  # in all grids of a notebook: about 250 kB
_NUMBERED = 24  # tokens; for a longer text, cells show no numbers
_MOST_LISTED = 3

CAUTION = (
    "Weights are not an explanation: they show where a head reads, "
    "not what it reads there or what the model makes of it."
)


@dataclass(frozen=True, repr=False)
class Attention:
    """Every head's attention weights over T tokens, and next-token probabilities after each token.

    A notebook shows a shaded grid for each head.
    """

    run: str
    model: str
    tokens: list[str]
    vocabulary: list[str]
    weights: Numbers
    """(L layers, H heads, T, T): row t has the weights of token t on the tokens up to itself"""
    probabilities: Numbers
    """(T, V): row t has the probabilities of the token after t"""

    def next_tokens(self, place: int = -1, count: int = 10) -> list[tuple[str, float]]:
        """Return the likeliest tokens after the token at index `place`, with probabilities."""
        probabilities_V = self.probabilities[place]
        return [
            (self.vocabulary[i], float(probabilities_V[i]))
            for i in likeliest(probabilities_V, count)
        ]

    def __repr__(self) -> str:
        layers, heads, length, _ = self.weights.shape
        return f"<Attention of {self.run!r}: {layers} × {heads} heads over {length} tokens>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: grids of the heads that fit, and the likeliest tokens."""
        from attnlm.see.page import fill

        heads = list(np.ndindex(*self.weights.shape[:2]))
        length = len(self.tokens)
        fitting = _MOST_CELLS // (length * (length + 1) // 2)
        return fill(
            "grids.html",
            attention=self,
            heads=heads[:fitting],
            left=len(heads[fitting:]),
            has_numbers=length <= _NUMBERED,
        )

    def facts(self) -> dict[str, Any]:
        """Return weights and next tokens as JSON values. Too many weights raise AttnlmError."""
        check_fits_json(self.weights.size)
        return {
            "run": self.run,
            "model": self.model,
            "tokens": self.tokens,
            "weights": self.weights.tolist(),
            "next": [{"token": t, "probability": p} for t, p in self.next_tokens()],
        }


def check_fits_json(numbers: int) -> None:
    """Raise AttnlmError if this many numbers are too many for JSON output."""
    if numbers > _MOST_IN_JSON:
        raise AttnlmError(
            f"{numbers:,} numbers are too many for JSON (at most {_MOST_IN_JSON:,})",
            "use a shorter text",
        )


def likeliest(scores_V: NDArray[Any], count: int) -> list[int]:
    """Return the ids of the `count` largest scores in descending order; ties by ascending id."""
    least = np.partition(scores_V, -count)[-count] if count < len(scores_V) else -np.inf
    ids: NDArray[np.int64] = np.flatnonzero(scores_V >= least)
    largest: list[int] = ids[np.argsort(-scores_V[ids], kind="stable")][:count].tolist()
    return largest


def attend(
    run: str | Path | Run | None,
    text: str,
    *,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Attention:
    """Compute what each head of a run (default: the one trained last) attends to in `text`.

        attention = attnlm.attend("multi-head-001", "Once upon")
        attention.tokens  # T texts
        attention.weights[0, 1]  # (T, T), layer 1, head 2: each row sums to 1
        attention.next_tokens(count=3)  # with their probabilities

    If the text is longer than the context, the model reads only the last tokens that fit, and
    `on_event` receives a Note. `checkpoint` is auto, best or last. Runs on the CPU. Raises
    AttnlmError for characters that the vocabulary lacks, for missing or damaged files, for numbers
    that are not finite, for a bigram, which has no attention, and for a class of your own that does
    not record its attention.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if run.config.spec.reason_against(Use.ATTENTION_MAPS) is not None:
        raise no_attention_error()
    ids = encode_text(run, text)
    block_size = run.config.spec.block_size
    if len(ids) > block_size:
        reads = f"{run.name} reads only the last {block_size:,} tokens, its context"
        (on_event or ignore)(Note(f"the text has {len(ids):,} tokens; {reads}"))
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    attention = compute_attention(run, model, ids[-block_size:])[0]
    if not attention.weights.size:
        raise NotRecordedError
    return attention


def compute_attention(run: Run, model: LanguageModel, ids: list[int]) -> tuple[Attention, Recorder]:
    """Run a forward pass over `ids`; return its attention, and the recorder of all activations.

    `weights` is empty for a model without attention, or whose attention does not record all maps.

    Raises NotFiniteError for NaN and infinity.
    """
    maps: list[NDArray[np.float32]] = []
    recorder = record(
        model, torch.tensor([ids]), watch=lambda maps_BHTT: maps.append(maps_BHTT[0].numpy())
    )
    check_finite(recorder.logits)
    maps_LHTT = np.empty((0, 0, len(ids), len(ids)), np.float32)
    if maps and recorder.has_equal_layers:
        maps_LHTT = np.concatenate(maps).reshape(len(recorder.layers), -1, len(ids), len(ids))
    attention = Attention(
        run=run.name,
        model=run.config.spec.name,
        tokens=token_texts(run.tokenizer, ids),
        vocabulary=token_texts(run.tokenizer, list(range(run.vocab_size))),
        weights=maps_LHTT,
        probabilities=torch.softmax(recorder.logits[0], -1).numpy(),
    )
    return attention, recorder


def in_colour(attention: Attention, width: int) -> Iterator[Columns]:
    """Yield each layer as coloured squares, one per head, for a terminal of `width` columns.

    A square has a row for each query token and a column for each token that it attends to. If a
    square is too wide, only its last row is shown.
    """
    from rich.cells import set_cell_size
    from rich.columns import Columns
    from rich.text import Text

    cells = [set_cell_size(visible(token), 2) for token in attention.tokens]
    is_whole = 2 * len(cells) + 3 <= width
    for layer, maps_HTT in enumerate(attention.weights, 1):
        squares = []
        for head, map_TT in enumerate(maps_HTT, 1):
            name = f"layer {layer} head {head}"
            square = Text(name if is_whole else f"{name}, the last token")
            for t in range(0 if is_whole else len(cells) - 1, len(cells)):
                square.append(f"\n{cells[t]} ")
                for cell, weight in zip(cells, map_TT[t, : t + 1].tolist(), strict=False):
                    square.append(cell, tint(weight))
            squares.append(square.append("\n"))
        yield Columns(squares, padding=(0, 1))


def attention_lines(attention: Attention) -> Iterator[str]:
    """Yield a line for each head and token, with its largest attention weights."""
    shown = [visible(token) for token in attention.tokens]
    widest = max(map(len, shown))
    for layer, head in np.ndindex(*attention.weights.shape[:2]):
        yield f"layer {layer + 1} head {head + 1}"
        for t, row_T in enumerate(attention.weights[layer, head]):
            places = likeliest(row_T[: t + 1], _MOST_LISTED)
            weights = "  ".join(f"{shown[s]}@{s} {row_T[s]:.2f}" for s in places)
            yield f"  {t:>3} {shown[t]:<{widest}}  {weights}"


def next_token_lines(likeliest: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Yield a line for each candidate for the next token."""
    yield "next token"
    for token, probability in likeliest:
        yield f"  {probability:6.1%}  {visible(token)}"
