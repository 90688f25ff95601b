"""The generation of tokens: logits of a decoder → temperature, top-k, top-p → a draw.

Axes: B texts, S tokens of the window that the model sees, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import NotFiniteError
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.spec import ModelSpec

Array = NDArray[Any]
Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]

_RANDOM_AT_ONCE = 2**16
"""Random numbers that are drawn together: a call costs more than a number."""


class Decoder(Protocol):
    """A model that computes the windows of a fixed number of texts."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return the next token's logits, (B, V); the next call may use their memory again.

        The window before had the first `known` tokens of the window `ids_BS`. All decoders give the
        logits of the model's forward pass up to rounding.
        """


NewDecoder = Callable[[int], Decoder]
"""A function that makes a decoder for a number of texts."""


def draw_tokens(
    decoder: Decoder,
    ids_BS: Ids,
    streams: Sequence[int],
    config: SamplingConfig,
    spec: ModelSpec,
) -> Iterator[tuple[Ids, Probabilities]]:
    """Draw `config.tokens` tokens that continue each text; yield them one by one.

    Each time, yield the ids (B,) and the unnormalised probabilities from which they were drawn,
    (B, V). `streams` has the number of each text's stream of random numbers. A window that exceeds
    the context slides by one token or, if the context does not slide, keeps its newer half: the
    cache is then filled again once and serves for many tokens. Raises NotFiniteError for logits
    that are NaN or infinite.
    """
    context = spec.block_size
    kept = context if spec.slides else max(1, context // 2)
    ids_BS, known = ids_BS[:, -context:], 0
    for uniforms_B in uniform_numbers(config.seed, streams, config.tokens):
        if ids_BS.shape[1] > context:
            ids_BS, known = ids_BS[:, -kept:], 0
        with np.errstate(all="ignore"):  # logits may be infinite
            p_BV = unnormalised_probabilities(
                decoder.logits(ids_BS, known), config.temperature, config.top_k, config.top_p
            )
            next_B = draw(p_BV, uniforms_B)
        known = ids_BS.shape[1]
        ids_BS = np.concatenate((ids_BS, next_B[:, None]), 1)
        yield next_B, p_BV


def unnormalised_probabilities(
    logits_BV: Array, temperature: float, top_k: int | None, top_p: float | None
) -> Probabilities:
    """Return softmax(logits / temperature) times any factor, (B, V), in float64.

    First, tokens outside the `top_k` likeliest get 0. Then, tokens outside the nucleus get 0.
    The nucleus is the smallest set of the likeliest tokens whose probabilities sum to at least
    `top_p` (Holtzman et al., 2020). With temperature 0, only the likeliest token is not 0.
    Raises NotFiniteError for logits that are NaN or infinite.
    """
    logits_BV = logits_BV.astype(np.float64)
    # A float64 sum of float32 numbers can't overflow: it is finite if all numbers are finite.
    if not math.isfinite(np.add.reduce(logits_BV, None)):
        raise NotFiniteError
    if temperature == 0:
        likeliest_BV = np.zeros_like(logits_BV)
        np.put_along_axis(likeliest_BV, logits_BV.argmax(-1, keepdims=True), 1, axis=-1)
        return likeliest_BV
    # The largest logit becomes 0, so that exp can't overflow, however small the temperature is.
    logits_BV -= np.maximum.reduce(logits_BV, -1, keepdims=True)
    if temperature != 1:
        logits_BV /= temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = np.partition(logits_BV, -top_k, axis=-1)[:, -top_k, None]
        logits_BV[~_is_among_largest(logits_BV, least_B1, top_k)] = -np.inf
    p_BV = np.exp(logits_BV, logits_BV)
    if top_p is not None and top_p < 1:
        p_BV = normalised(p_BV)
        ordered_BV = np.sort(p_BV, -1)[:, ::-1]
        count_B1 = (ordered_BV.cumsum(-1) - ordered_BV < top_p).sum(-1, keepdims=True)
        least_B1 = np.take_along_axis(ordered_BV, count_B1 - 1, -1)
        p_BV = np.where(_is_among_largest(p_BV, least_B1, count_B1), p_BV, 0)
    return p_BV


def _is_among_largest(x_BV: Array, least_B1: Array, count: int | Array) -> Array:
    """Return where the `count` largest numbers of each row are, of which the least is given.

    Of equal numbers, those with the lower ids count first.
    """
    larger_BV = x_BV > least_B1
    equal_BV = x_BV == least_B1
    room_B1 = count - larger_BV.sum(-1, keepdims=True)
    kept_BV: Array = larger_BV | (equal_BV & (equal_BV.cumsum(-1) <= room_B1))
    return kept_BV


def normalised(p_BV: Probabilities) -> Probabilities:
    """Return the probabilities of each row, (B, V), which sum to 1."""
    return p_BV / np.add.reduce(p_BV, -1, keepdims=True)


def draw(p_BV: Probabilities, uniforms_B: Probabilities) -> Ids:
    """Draw a token for each sample, (B,), in proportion to p.

    A sample has a number u in `uniforms_B`, with 0 ≤ u < 1. Its token is the first at which the
    running sum of p exceeds u times the total. A token with p = 0 is never drawn.
    """
    sums_BV = np.add.accumulate(p_BV, -1)
    # u ≤ 1 − 2⁻⁵³, so that the product is less than the total, also after rounding.
    drawn_B: Ids = (sums_BV > (uniforms_B * sums_BV[:, -1])[:, None]).argmax(-1)
    return drawn_B


def uniform_numbers(seed: int, streams: Sequence[int], steps: int) -> Iterator[Probabilities]:
    """Yield random numbers in [0, 1) for a number of steps, (B,), one of each stream.

    A stream is determined by (seed, number of the stream).
    """
    keys = [np.random.SeedSequence([seed, stream]) for stream in streams]
    generators = [np.random.Generator(np.random.Philox(key)) for key in keys]
    most = _RANDOM_AT_ONCE // max(64, len(streams))
    for first in range(0, steps, most):
        yield from np.stack([g.random(min(most, steps - first)) for g in generators], 1)
