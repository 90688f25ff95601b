"""The logit lens (nostalgebraist, 2020): what the LM head reads in the stream after each layer.

In a transformer every layer adds to one residual stream, and norm and head turn its last state into
the prediction. The lens puts them to the earlier states too, as if the layers above were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.recorder import Recorder
from attnlm.see.text import visible

_TOKENS_AT_ONCE = 2**6  # whose logits, over the whole vocabulary, are in memory


@dataclass(frozen=True)
class LensRow:
    """For each of T tokens the K likeliest next ones, read after one layer; the likeliest first."""

    name: str
    ids: NDArray[np.int64]
    """(T, K)"""
    probabilities: NDArray[np.float32]
    """(T, K)"""


@torch.inference_mode()
def logit_lens(model: LanguageModel, seen: Recorder, count: int = 5) -> list[LensRow]:
    """A row for the embeddings and one for each layer; the last is the model's own prediction.

    Each has the `count` likeliest tokens, fewer where the vocabulary is smaller. None at all for a
    bigram, which has no layers; and none for embeddings of another width than the head reads, which
    a one-layer rung may have. Raises NotFiniteError for NaN and infinity.
    """
    if not isinstance(model, Transformer):
        return []
    streams = {"embedding": seen.embedded}
    streams |= {f"layer {n}": layer.stream for n, layer in enumerate(seen.layers, 1)}
    return [
        _row(name, model, stream_BTC[0], min(count, model.vocab_size))
        for name, stream_BTC in streams.items()
        if stream_BTC is not None and stream_BTC.size(-1) == model.architecture.body_dim
    ]


def _row(name: str, model: Transformer, stream_TC: Tensor, count: int) -> LensRow:
    ids, probabilities = [], []
    for some_TC in stream_TC.split(_TOKENS_AT_ONCE):
        logits_TV = model.read_out(some_TC)
        check_finite(logits_TV)
        largest_TK, ids_TK = logits_TV.topk(count)
        ids.append(ids_TK)
        probabilities.append(torch.exp(largest_TK - logits_TV.logsumexp(-1, keepdim=True)))
    return LensRow(name, torch.cat(ids).numpy(), torch.cat(probabilities).numpy())


def lens_data(rows: Sequence[LensRow], vocabulary: Sequence[str]) -> dict[str, Any]:
    """For lens.js: the tokens that occur, and for each layer and place the likeliest of these.

    Layer by layer, token by token, the likeliest first: the numbers of `words`, and percents.
    """
    if not rows:
        return {"words": [], "ids": [], "percents": [], "count": 0}
    ids_LTK = np.stack([row.ids for row in rows])
    probabilities_LTK = np.stack([row.probabilities for row in rows])
    found, places = np.unique(ids_LTK, return_inverse=True)
    return {
        "words": [visible(vocabulary[i]) for i in found.tolist()],
        "ids": places.ravel().tolist(),
        "percents": np.rint(100 * probabilities_LTK).astype(int).ravel().tolist(),
        "count": ids_LTK.shape[-1],
    }
