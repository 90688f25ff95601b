"""From logits to the next token: temperature, top-k, top-p, and the draw."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import NotFiniteError

Array = NDArray[Any]
Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]

_FEW = 512
"""Likeliest tokens that are tried first as those that a nucleus is among."""
_ROUNDING = 1e-9
"""More than a sum of probabilities is off."""


def next_token_weights(
    logits_BV: Array, temperature: float, top_k: int | None, top_p: float | None
) -> Probabilities:
    """softmax(logits / temperature), cut to the top_k likeliest and then to the nucleus, (B, V).

    They are probabilities but for a factor. Temperature 0 puts everything on the likeliest token.
    The nucleus is the smallest set of the likeliest tokens whose probabilities sum to at least
    top_p (Holtzman et al., 2020). Computed in float64. Raises NotFiniteError for logits that are
    NaN or infinite.
    """
    logits_BV = logits_BV.astype(np.float64)
    # A sum in float64 of float32 numbers can't overflow: it is finite where all of them are.
    if not math.isfinite(np.add.reduce(logits_BV, None)):
        raise NotFiniteError
    if temperature == 0:
        likeliest_BV = np.zeros_like(logits_BV)
        np.put_along_axis(likeliest_BV, logits_BV.argmax(-1, keepdims=True), 1, axis=-1)
        return likeliest_BV
    # The largest logit becomes 0, so that no temperature however small overflows.
    logits_BV -= np.maximum.reduce(logits_BV, -1, keepdims=True)
    if temperature != 1:
        logits_BV /= temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        dropped = np.argpartition(logits_BV, -top_k, axis=-1)[:, :-top_k]
        np.put_along_axis(logits_BV, dropped, -np.inf, axis=-1)
    weights_BV = np.exp(logits_BV, logits_BV)
    if top_p is not None and top_p < 1:
        weights_BV = _nucleus(normalised(weights_BV), top_p)
    return weights_BV


def _nucleus(weights_BV: Probabilities, top_p: float) -> Probabilities:
    """Probabilities, those outside the nucleus 0. Few of a large vocabulary need sorting."""
    columns = _likeliest(weights_BV, top_p)
    likely_BN = weights_BV[:, columns]
    places = np.argsort(-likely_BN, axis=-1, kind="stable")
    ordered = np.take_along_axis(likely_BN, places, -1)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    np.put_along_axis(likely_BN, places, ordered, -1)
    kept_BV = np.zeros_like(weights_BV)
    kept_BV[:, columns] = likely_BN
    return kept_BV


def _likeliest(weights_BV: Probabilities, top_p: float) -> NDArray[np.int64] | slice:
    """Tokens among which the nucleus of every row is, in their order: equals among them too."""
    count, size = _FEW, weights_BV.shape[-1]
    while count < size // 2:
        least_B1 = np.partition(weights_BV, -count, -1)[:, -count, None]
        likely_BV = weights_BV >= least_B1
        sums_B = np.add.reduce(weights_BV, -1, where=likely_BV)
        if (sums_B > top_p + _ROUNDING).all():
            return np.flatnonzero(likely_BV.any(0))
        count *= 8
    return slice(None)


def normalised(weights_BV: Probabilities) -> Probabilities:
    return weights_BV / np.add.reduce(weights_BV, -1, keepdims=True)


def draw(weights_BV: Probabilities, uniforms_B: Probabilities) -> Ids:
    """The token where the running sum passes a share of the whole, drawn from [0, 1), (B,).

    A token of weight 0 is never drawn.
    """
    sums_BV = np.add.accumulate(weights_BV, -1)
    totals_B = sums_BV[:, -1]
    # Rounding must not lift the product to the total itself.
    wanted_B = np.minimum(uniforms_B * totals_B, np.nextafter(totals_B, 0))
    drawn_B: Ids = (sums_BV > wanted_B[:, None]).argmax(-1)
    return drawn_B


class Uniforms:
    """For each sample a stream of numbers in [0, 1) of its own: a function of (seed, sample)."""

    def __init__(self, seed: int, samples: Iterable[int]) -> None:
        keys = [np.random.SeedSequence([seed, sample]) for sample in samples]
        self._streams = [np.random.Generator(np.random.Philox(key)) for key in keys]
        self._ahead_TB = np.empty((0, len(self._streams)))

    def take(self, count: int) -> Probabilities:
        """Return the next numbers of every sample, float64 (count, B)."""
        if len(self._ahead_TB) < count:
            # Many at once: a call for a single number takes longer than drawing it.
            more = max(count, 2**16 // max(64, len(self._streams)))
            drawn_TB = np.stack([stream.random(more) for stream in self._streams], axis=1)
            self._ahead_TB = np.concatenate([self._ahead_TB, drawn_TB])
        taken, self._ahead_TB = self._ahead_TB[:count], self._ahead_TB[count:]
        return taken
