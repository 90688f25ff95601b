"""Make an HTML page of attention: a grid of all heads, one enlarged head, and the tinted text."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnlm.see.attend import CAUTION, Attention, Numbers, likeliest
from attnlm.see.page import encode_base64, render
from attnlm.see.shown_tokens import visible

CANDIDATES = 8
TEMPERATURES = [tenths / 10 for tenths in range(1, 21)]
_MOST_WEIGHTS = 700_000  # attention weights in a page, four characters each


def attention_page(attention: Attention) -> bytes:
    """Return the page, in UTF-8."""
    data, content = attention_content(attention)
    return render("attend.html", script="attend_page.js", data=data, **content)


def attention_content(attention: Attention) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON values that attend.js reads, and the values that the page template shows."""
    layers, heads = attention.weights.shape[:2]
    maps = packed_maps(attention.weights) if layers else None
    data = {
        "tokens": [visible(token) for token in attention.tokens],
        "layers": layers,
        "heads": heads,
        "maps": maps,
        "next": next_tokens_data(attention),
    }
    least_weight = maps["least"] / 255 if maps else 0.0
    content = {"attention": attention, "caution": CAUTION, "layers": layers}
    return data, content | {"least_weight": least_weight}


def packed_maps(maps_LHTT: Numbers) -> dict[str, Any]:
    """Return all heads' maps in a few MB, for attend.js.

    An attention weight is rounded to steps of 1/255, in one byte. Weights of fewer than `least`
    steps are left out. For a short text, `least` is 1: only weights that round to 0 are left out.
    For a longer text, it is higher: only the largest weights of all maps are stored, up to a
    maximum number. The script draws the left-out weights of a row as equal, so that the row sums to
    about 1. So no drawn weight is off by more than `least` steps.

    `counts` has the number of weights stored in each row, head by head. `columns` and `steps` have
    the column and the steps of each stored weight. All are base64: `steps` of 8-bit numbers, the
    others of 16-bit numbers.
    """
    length = maps_LHTT.shape[-1]
    steps_MTT = np.empty((maps_LHTT[..., 0, 0].size, length, length), np.uint8)
    counts_by_steps = np.zeros(256, np.int64)
    for steps_TT, map_TT in zip(steps_MTT, maps_LHTT.reshape(steps_MTT.shape), strict=True):
        steps_TT[:] = np.rint(map_TT * 255)
        counts_by_steps += np.bincount(steps_TT.ravel(), minlength=256)
    counts_from_steps = counts_by_steps[::-1].cumsum()[::-1]
    least = 1 + int(np.count_nonzero(counts_from_steps[1:] > _MOST_WEIGHTS))
    held_MTT = steps_MTT >= least
    return {
        "least": least,
        "counts": encode_base64(held_MTT.sum(-1).astype("<u2")),
        "columns": encode_base64(held_MTT.nonzero()[-1].astype("<u2")),
        "steps": encode_base64(steps_MTT[held_MTT]),
    }


def next_tokens_data(attention: Attention) -> dict[str, Any]:
    """Return the likeliest next tokens after each token, for each of TEMPERATURES.

    With logits l and their maximum m, a candidate is (token, l − m). For each temperature τ, the
    result also has the sum of exp((l − m) / τ) over the whole vocabulary. So a candidate's
    probability is exp((l − m) / τ) / sum, exact up to rounding, though the page has only a few
    candidates.
    """
    with np.errstate(divide="ignore"):  # log 0 = −∞ if a probability underflows
        logs_TV = np.log(attention.probabilities)
    logs_TV -= logs_TV.max(-1, keepdims=True)
    sums_NT = np.array([np.exp(logs_TV / np.float32(t)).sum(-1) for t in TEMPERATURES])
    candidates = [
        [
            (visible(attention.vocabulary[i]), round(max(float(logs_V[i]), -1e3), 4))
            for i in likeliest(logs_V, CANDIDATES)
        ]
        for logs_V in logs_TV
    ]
    sums = [[float(f"{total:.6g}") for total in sums_N] for sums_N in sums_NT.T]
    return {
        "candidates": candidates,
        "sums": sums,
        "temperatures": TEMPERATURES,
        "vocabulary": len(attention.vocabulary),
    }
