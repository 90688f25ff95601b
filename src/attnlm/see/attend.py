"""What each head of a run looks at in a text, and what the model expects to come next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.model.inspection import check_finite
from attnlm.model.recorder import Recorder, no_attention, record
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.see.text import ids_within_context, token_texts

Numbers = NDArray[np.float32]

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
        likeliest = np.argsort(-self.probabilities[place], kind="stable")[:count]
        return [(self.vocabulary[i], float(self.probabilities[place, i])) for i in likeliest]

    def __repr__(self) -> str:
        layers, heads, length, _ = self.weights.shape
        return f"<Attention of {self.run!r}: {layers} × {heads} heads over {length} tokens>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from attnlm.see.attend_html import attention_html

        return attention_html(self)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "run": self.run,
            "model": self.model,
            "tokens": self.tokens,
            "weights": self.weights.tolist(),
            "next": [{"token": t, "probability": p} for t, p in self.next_tokens()],
        }


def attend(
    run: str | Path | Run | None,
    text: str,
    *,
    checkpoint: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
) -> Attention:
    """What each head of a run (by default the one trained last) attends to in `text`.

        attention = attnlm.attend("multi-head-001", "Once upon")
        attention.tokens  # T texts
        attention.weights[0, 1]  # (T, T), of layer 1, head 2: each row adds up to 1
        attention.next_tokens(count=3)  # with their probabilities

    `checkpoint` is auto, best or last; it is computed on the CPU. Raises AttnlmError when the text
    does not fit the context or the vocabulary, when files are missing or damaged, for numbers that
    are not finite, and for a bigram, which has no attention.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if not run.config.model.maps_per_layer:
        raise no_attention()
    ids = ids_within_context(run, text)
    model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
    seen = record(model, torch.tensor([ids]))
    return attention_of(run, ids, seen)


def attention_of(run: Run, ids: list[int], seen: Recorder) -> Attention:
    """What a forward pass over `ids` found; no maps of a model without attention.

    Raises NotFiniteError for NaN and infinity.
    """
    has_maps = run.config.model.maps_per_layer > 0
    weights_LHTT = seen.weights[:, 0] if has_maps else torch.zeros(0, 0, len(ids), len(ids))
    check_finite(weights_LHTT, seen.logits)
    return Attention(
        run=run.name,
        model=run.config.model.model,
        tokens=token_texts(run.tokenizer, ids),
        vocabulary=token_texts(run.tokenizer, list(range(run.vocab_size))),
        weights=weights_LHTT.numpy(),
        probabilities=torch.softmax(seen.logits[0], -1).numpy(),
    )
