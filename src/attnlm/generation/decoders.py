"""Decoders, which give the logits of the next token, and the generation of tokens with them.

All decoders give the logits of the model's forward pass up to rounding. Axes: B texts, S tokens of
the window that the model sees, T new tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from attnlm.base.errors import NotFiniteError
from attnlm.compute.native import native_library
from attnlm.generation.batch import Batch
from attnlm.generation.native_decoder import NativeDecoder, NativeModel
from attnlm.generation.next_token import Array, Ids, Probabilities, draw, unnormalised_probabilities
from attnlm.model.spec import ModelSpec, is_ours

_MOST_ON_CPU = 30_000_000
"""The most weights with which the decoder in C generates a text faster than a GPU, which waits at
each token for the launches of its kernels (docs/speed.md)."""
_SECONDS_PER_BLOCK, _SECONDS_OF_SEVERAL = 0.01, 0.05
"""How often the text of one stream is shown, and the ends of several texts are looked for."""


class Decoder(Protocol):
    """A model that computes the windows of a fixed number of texts."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return the next token's logits, (B, V); the next call may use their memory again.

        The window before had the first `known` tokens of the window `ids_BS`.
        """


NewDecoder = Callable[[int], Decoder]
"""A function that makes a decoder for a number of texts."""


class BigramTable:
    """The decoder of a bigram: the row of a token has the logits of the next token."""

    def __init__(self, table_VV: Array) -> None:
        self._table_VV = table_VV

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return the next token's logits, (B, V)."""
        rows: Array = self._table_VV[ids_BS[:, -1]]
        return rows


def is_known(spec: ModelSpec) -> bool:
    """Return True if `decoders_from_weights` knows all parts of a model."""
    return is_ours(spec)


def decoders_from_weights(
    spec: ModelSpec, vocab_size: int, read_weights: Callable[[], Mapping[str, Array]]
) -> NewDecoder | None:
    """Return decoders, in NumPy or in C, of a model that is known and that has these weights, in
    float32; None if there are no kernels."""
    assert is_ours(spec)
    if not spec.width:
        table_VV = read_weights()["table.weight"]
        return lambda _: BigramTable(table_VV)
    if (library := native_library()) is None:
        return None
    model = NativeModel(spec, vocab_size, read_weights(), library)
    return lambda texts: NativeDecoder(model, texts)


def is_fastest_on_cpu(spec: ModelSpec, vocab_size: int) -> bool:
    """Return True if a CPU generates text faster than a GPU."""
    if not is_known(spec):
        return False
    costs = spec.costs(vocab_size)
    is_small = native_library() is not None and costs.multiplied_weights < _MOST_ON_CPU
    return is_small or not costs.width


def tokens_kept_when_full(spec: ModelSpec) -> int:
    """Return how many of the newest tokens stay in a window that has exceeded the context.

    If the context slides, all but the oldest token stay. Otherwise, only half a context stays: the
    cache is filled again once and then serves for many tokens.
    """
    return spec.block_size if spec.slides else max(1, spec.block_size // 2)


def draw_tokens(
    decoder: Decoder, batch: Batch, spec: ModelSpec
) -> Iterator[tuple[Ids, Probabilities]]:
    """Draw the next token of each text of a batch, in each of its steps. Each time, yield the ids
    (B,) and the unnormalised probabilities from which they were drawn, (B, V)."""
    config, context, kept = batch.config, spec.block_size, tokens_kept_when_full(spec)
    texts, end = batch.start.shape
    ids = np.zeros((texts, 2 * context), np.int64)  # the texts' newest tokens
    ids[:, :end] = batch.start
    begin = known = 0  # the window's first token, and the number of those that the decoder has seen
    for given_B, uniforms_B in batch.steps():
        if end - begin > context:
            begin, known = end - kept, 0
        with np.errstate(all="ignore"):
            logits_BV = decoder.logits(ids[:, begin:end], known)
            if given_B is not None:
                logits_BV[given_B >= 0] = 0  # they may be infinite
            p_BV = unnormalised_probabilities(
                logits_BV, config.temperature, config.top_k, config.top_p
            )
            next_B = draw(p_BV, uniforms_B)
            if given_B is not None:
                next_B = np.where(given_B < 0, next_B, given_B)
        known = end - begin
        if end == ids.shape[1]:
            ids[:, :known] = ids[:, begin:end]
            begin, end = 0, known
        ids[:, end] = next_B
        end += 1
        yield next_B, p_BV


def blocks_of_tokens(decoder: Decoder, batch: Batch, spec: ModelSpec) -> Iterator[Ids]:
    """Yield the next ids of the texts of a batch in blocks (T, B), some milliseconds each.

    Raises NotFiniteError, after the ids before it, if logits are NaN or infinite.
    """
    drawn = draw_tokens(decoder, batch, spec)
    seconds = _SECONDS_PER_BLOCK if len(batch.start) == 1 else _SECONDS_OF_SEVERAL
    block: list[Ids] = []
    error = None
    while error is None:
        until = time.perf_counter() + (seconds if block else 0)
        block.clear()
        try:
            while not block or time.perf_counter() < until:
                block.append(next(drawn)[0])
        except (StopIteration, NotFiniteError) as end:
            error = end
        if block:
            yield np.stack(block)
    if isinstance(error, NotFiniteError):
        raise error
