"""The logit lens (nostalgebraist, 2020): what the LM head reads in the stream after each layer.

In a transformer every layer adds to one residual stream, and norm and head turn its last state into
the prediction. The lens puts them to the earlier states too, as if the layers above were not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlm.model.inspection import check_finite
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.recorder import Recorder


@dataclass(frozen=True)
class LensRow:
    """For each of T tokens the likeliest next one, read after one layer."""

    name: str
    ids: list[int]
    probabilities: list[float]


@torch.inference_mode()
def logit_lens(model: LanguageModel, seen: Recorder) -> list[LensRow]:
    """A row for the embeddings and one for each layer; the last is the model's own prediction.

    None at all for a bigram, which has no layers; and none for embeddings of another width than the
    head reads, which a one-layer rung may have. Raises NotFiniteError for NaN and infinity.
    """
    if not isinstance(model, Transformer):
        return []
    streams = {"embedding": seen.embedded}
    streams |= {f"layer {n}": layer.stream for n, layer in enumerate(seen.layers, 1)}
    return [
        _row(name, model.read_out(stream_BTC)[0])
        for name, stream_BTC in streams.items()
        if stream_BTC is not None and stream_BTC.size(-1) == model.architecture.body_dim
    ]


def _row(name: str, logits_TV: Tensor) -> LensRow:
    check_finite(logits_TV)
    probabilities_T, ids_T = torch.softmax(logits_TV, -1).max(-1)
    return LensRow(name, ids_T.tolist(), probabilities_T.tolist())
