"""What comes next, at any temperature of a page's slider, exactly and in few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnlm.see.attend import Attention, likeliest
from attnlm.see.text import visible

CANDIDATES = 8
TEMPERATURES = [tenths / 10 for tenths in range(1, 21)]


def next_tokens_data(attention: Attention) -> dict[str, Any]:
    """For a script: of each place the likeliest tokens, and what all tokens sum to.

    With logits l and the largest of them m, a candidate is (token, l − m), and the sum at a
    temperature τ is Σ exp((l − m) / τ) over the whole vocabulary: so a candidate's probability,
    exp((l − m) / τ) / sum, is exact at each of TEMPERATURES, however large the vocabulary (to the
    rounding of float32 sums).
    """
    temperatures_N1 = torch.tensor(TEMPERATURES)[:, None]
    scaled_NV = torch.empty(len(TEMPERATURES), len(attention.vocabulary))
    candidates, sums = [], []
    for probabilities_V in attention.probabilities:  # one place at a time: V may be large
        with np.errstate(divide="ignore"):  # −∞ where a probability is too small for a float
            logs_V = np.log(probabilities_V.astype(np.float64))
        logs_V -= logs_V.max()
        torch.div(torch.from_numpy(logs_V).float(), temperatures_N1, out=scaled_NV)
        sums_N = scaled_NV.exp_().sum(-1)
        sums.append([float(f"{total:.6g}") for total in sums_N.tolist()])
        candidates.append(
            [
                (visible(attention.vocabulary[i]), round(max(float(logs_V[i]), -1e3), 4))
                for i in likeliest(logs_V, CANDIDATES)
            ]
        )
    return {
        "candidates": candidates,
        "sums": sums,
        "temperatures": TEMPERATURES,
        "vocabulary": len(attention.vocabulary),
    }
