"""What each head of a run looks at in a text, and what the model expects to come next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import Recorder, no_attention, record
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.see.text import ids_of, token_texts

Numbers = NDArray[np.float32]

MOST_IN_JSON = 2**24
"""Numbers, which then take about 400 MB."""

CAUTION = (
    "Weights are not an explanation: they show where a head reads, "
    "not what it reads there or what the model makes of it."
)


@dataclass(frozen=True, repr=False)
class Attention:
    """Of a text of T tokens: every head's weights, and the probabilities after each token.

    A notebook shows it as a shaded grid for each head.
    """

    run: str
    model: str
    tokens: list[str]
    vocabulary: list[str]
    weights: Numbers
    """(L, H, T, T): row t says how token t divides its attention over the tokens up to itself"""
    probabilities: Numbers
    """(T, V)"""

    def next_tokens(self, place: int = -1, count: int = 10) -> list[tuple[str, float]]:
        """The likeliest tokens after the one at `place`, with their probabilities."""
        probabilities_V = self.probabilities[place]
        return [
            (self.vocabulary[i], float(probabilities_V[i]))
            for i in likeliest(probabilities_V, count)
        ]

    def __repr__(self) -> str:
        layers, heads, length, _ = self.weights.shape
        return f"<Attention of {self.run!r}: {layers} × {heads} heads over {length} tokens>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from attnlm.see.attend_html import attention_html

        return attention_html(self)

    def facts(self) -> dict[str, Any]:
        """As JSON values. Raises AttnlmError where they are too many."""
        if self.weights.size > MOST_IN_JSON:
            raise AttnlmError(
                f"{self.weights.size:,} attention weights are too many for JSON (at most "
                f"{MOST_IN_JSON:,})",
                "give a shorter text, or write a page: `output` FILE.html",
            )
        return {
            "run": self.run,
            "model": self.model,
            "tokens": self.tokens,
            "weights": self.weights.tolist(),
            "next": [{"token": t, "probability": p} for t, p in self.next_tokens()],
        }


def likeliest(scores_V: NDArray[Any], count: int) -> list[int]:
    """The ids of the `count` largest scores, the largest first; of equal ones the first."""
    least = np.partition(scores_V, -count)[-count] if count < len(scores_V) else -np.inf
    ids: NDArray[np.int64] = np.flatnonzero(scores_V >= least)
    found: list[int] = ids[np.argsort(-scores_V[ids], kind="stable")][:count].tolist()
    return found


def attend(
    run: str | Path | Run | None,
    text: str,
    *,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Attention:
    """What each head of a run (by default the one trained last) attends to in `text`.

        attention = attnlm.attend("multi-head-001", "Once upon")
        attention.tokens  # T texts
        attention.weights[0, 1]  # (T, T), of layer 1, head 2: each row adds up to 1
        attention.next_tokens(count=3)  # with their probabilities

    Of a text longer than the context the last tokens that fit are taken; a Note says so.
    `checkpoint` is auto, best or last; it is computed on the CPU. Raises AttnlmError for characters
    that the vocabulary lacks, when files are missing or damaged, for numbers that are not finite,
    and for a bigram, which has no attention.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if not run.config.model.maps_per_layer:
        raise no_attention()
    ids, most = ids_of(run, text), run.config.model.block_size
    if len(ids) > most:
        words = f"the text has {len(ids):,} tokens; {run.name} reads the last {most:,}, its context"
        (on_event or ignore)(Note(words))
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    return attention_of(run, model, ids[-most:])[0]


def attention_of(run: Run, model: LanguageModel, ids: list[int]) -> tuple[Attention, Recorder]:
    """What a forward pass over `ids` found, and its other numbers; no maps without attention.

    Raises NotFiniteError for NaN and infinity.
    """
    a, length = run.config.model, len(ids)
    layers = a.layers if a.maps_per_layer else 0
    weights_LHTT = np.empty((layers, a.maps_per_layer, length, length), np.float32)
    free = iter(weights_LHTT)

    def keep(weights_BHTT: torch.Tensor) -> None:
        check_finite(weights_BHTT)
        next(free)[:] = weights_BHTT[0].numpy()

    seen = record(model, torch.tensor([ids]), watch=keep)
    check_finite(seen.logits)
    found = Attention(
        run=run.name,
        model=a.model,
        tokens=token_texts(run.tokenizer, ids),
        vocabulary=token_texts(run.tokenizer, list(range(run.vocab_size))),
        weights=weights_LHTT,
        probabilities=torch.softmax(seen.logits[0], -1).numpy(),
    )
    return found, seen
