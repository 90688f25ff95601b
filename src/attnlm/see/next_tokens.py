"""What comes next, at any temperature of a page's slider, exactly and in few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnlm.see.attend import Attention
from attnlm.see.text import visible

CANDIDATES = 8
TEMPERATURES = [tenths / 10 for tenths in range(1, 21)]


def next_tokens_data(attention: Attention) -> dict[str, Any]:
    """For a script: of each place the likeliest tokens, and what all tokens sum to.

    With logits l and the largest of them m, a candidate is (token, l − m), and the sum at a
    temperature τ is Σ exp((l − m) / τ) over the whole vocabulary: so a candidate's probability,
    exp((l − m) / τ) / sum, is exact at each of TEMPERATURES, however large the vocabulary.
    """
    with np.errstate(divide="ignore"):  # −∞ where a probability is too small for a float
        logs_TV = np.log(attention.probabilities.astype(np.float64))
    logs_TV -= logs_TV.max(-1, keepdims=True)
    likeliest_TK = np.argsort(-logs_TV, axis=-1, kind="stable")[:, :CANDIDATES]
    sums_TN = np.stack([np.exp(logs_TV / t).sum(-1) for t in TEMPERATURES], axis=-1)
    candidates = [
        [(visible(attention.vocabulary[i]), round(max(float(logs_V[i]), -1e3), 4)) for i in ids]
        for logs_V, ids in zip(logs_TV, likeliest_TK.tolist(), strict=True)
    ]
    return {
        "candidates": candidates,
        "sums": [[float(f"{total:.6g}") for total in sums] for sums in sums_TN.tolist()],
        "temperatures": TEMPERATURES,
        "vocabulary": len(attention.vocabulary),
    }
