"""Logits of the next token: the fastest form of a model that is exact, on its device.

Every form here equals the model's own forward pass up to rounding. Axes: B samples, S tokens of the
window, T new ones among them, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from attnlm.attention import LayerCache
from attnlm.decoding_native import NativeOneLayer, NativeTransformer
from attnlm.decoding_numpy import (
    Array,
    Ids,
    OneLayerDecoder,
    TransformerDecoder,
    as_array,
    one_thread,
    table_size,
)
from attnlm.device import Device
from attnlm.model import AttentionModel, Bigram, LanguageModel, Transformer
from attnlm.native import COMPILATION, library
from attnlm.parallel import cores

_LARGEST_TABLES = 2**24
_FEWEST_SIDE_BY_SIDE = 8  # samples that are worth a thread


class Decoder(Protocol):
    """What sampling asks for logits."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """(B, V) for the token after a window, whose first `known` tokens were there before."""


def new_decoder(model: LanguageModel, device: Device, tokens: int, num_samples: int) -> Decoder:
    """The fastest exact form of a model on its device, for so many tokens of each sample."""
    if device.name != "cpu" or device.dtype != "float32":
        return CachedDecoder(model, device)
    if isinstance(model, Bigram):
        return BigramDecoder(model)
    if not isinstance(model, Transformer) and table_size(model) > _LARGEST_TABLES:
        return CachedDecoder(model, device)
    parts = min(cores(), num_samples // _FEWEST_SIDE_BY_SIDE)
    if not isinstance(model, Transformer) or parts < 2:
        return _new_decoder(model, tokens, num_samples)
    return SideBySide(lambda samples: _new_decoder(model, tokens, samples), num_samples, parts)


def _new_decoder(model: AttentionModel | Transformer, tokens: int, num_samples: int) -> Decoder:
    is_single = model.head.weight.dtype == torch.float32
    worth = is_single and tokens * _saved_by_compiling(model, num_samples) > COMPILATION
    compiled = library("decoding.c") if worth else None
    if isinstance(model, Transformer):
        if compiled is not None:
            return NativeTransformer(model, num_samples, compiled)
        return TransformerDecoder(model, num_samples)
    if compiled is not None:
        return NativeOneLayer(model, num_samples, compiled)
    return OneLayerDecoder(model)


def _saved_by_compiling(model: AttentionModel | Transformer, num_samples: int) -> float:
    """Seconds per token of all samples, measured on small models: mostly the time of calls."""
    if isinstance(model, Transformer):
        return len(model.blocks) * (17e-6 + num_samples * 8e-6)
    return 6e-6 + num_samples * 1e-6


class PlainDecoder:
    """The model itself, which computes everything anew each time."""

    def __init__(self, model: LanguageModel, device: Device) -> None:
        self._model, self._device = model, device

    def logits(self, ids_BS: Ids, known: int) -> Array:
        return self._forward(ids_BS, None)

    def _forward(self, ids_BT: Ids, caches: list[LayerCache] | None) -> Array:
        ids = torch.from_numpy(np.ascontiguousarray(ids_BT)).to(self._device.torch)
        with torch.inference_mode(), self._device.autocast():
            logits_BV = self._model(ids, caches)[:, -1]
        return as_array(logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float())


class CachedDecoder(PlainDecoder):
    """The model itself with the keys and values of the tokens that it knows: for any device."""

    def __init__(self, model: LanguageModel, device: Device) -> None:
        super().__init__(model, device)
        self._caches = model.new_caches()

    def logits(self, ids_BS: Ids, known: int) -> Array:
        if known == 0:
            for cache in self._caches:
                cache.clear()
        return self._forward(ids_BS[:, known:], self._caches)


class BigramDecoder:
    """Rows of a table."""

    def __init__(self, model: Bigram) -> None:
        self._table_VV = as_array(model.table.weight)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        return self._table_VV[ids_BS[:, -1]]


class SideBySide:
    """Many samples, divided among as many threads as there are parts."""

    def __init__(self, make: Callable[[int], Decoder], num_samples: int, parts: int) -> None:
        sizes = [len(part) for part in np.array_split(np.arange(num_samples), parts)]
        self._decoders = list(map(make, sizes))
        self._borders = np.cumsum(sizes)[:-1]
        # A thread does not take over how NumPy's warnings are set here.
        quiet = functools.partial(np.seterr, all="ignore")
        self._pool = ThreadPoolExecutor(parts - 1, initializer=quiet)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        parts = np.split(ids_BS, self._borders)
        with one_thread():  # for each part
            # This thread takes a part too: one that waits has to be woken, which takes its time.
            others = [
                self._pool.submit(decoder.logits, ids_PS, known)
                for decoder, ids_PS in zip(self._decoders[1:], parts[1:], strict=True)
            ]
            first = self._decoders[0].logits(parts[0], known)
            return np.concatenate([first, *(other.result() for other in others)])
