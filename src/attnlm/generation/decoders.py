"""Logits of the next token: the fastest form of a model that is exact, on its device.

Every form here equals the model's own forward pass up to rounding. Axes: B samples, S tokens of the
window, T new ones among them, P samples of one thread, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.pieces import cores
from attnlm.compute.device import Device
from attnlm.compute.native import library
from attnlm.generation.native_decoder import NativeDecoder, NativeModel
from attnlm.model.attention import LayerCache
from attnlm.model.language_model import Bigram, LanguageModel

Array = NDArray[Any]
Ids = NDArray[np.int64]

_FEWEST_SIDE_BY_SIDE = 8
"""Samples that are worth a thread; of a single layer, none are."""


class Decoder(Protocol):
    """What sampling asks for logits."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """(B, V) for the token after a window, whose first `known` tokens were there before."""


def new_decoder(model: LanguageModel, device: Device, num_samples: int) -> Decoder:
    """The fastest exact form of a model on its device."""
    is_single = all(p.dtype == torch.float32 for p in model.parameters())
    if (device.name, device.dtype) != ("cpu", "float32") or not is_single:
        return CachedDecoder(model, device)
    if isinstance(model, Bigram):
        return BigramDecoder(model)
    if (compiled := library("decoding.c")) is None:
        return CachedDecoder(model, device)
    native = NativeModel(model, compiled)
    parts = min(cores(), num_samples // _FEWEST_SIDE_BY_SIDE)
    if parts < 2 or model.architecture.slides or native.is_large:  # whose crew uses all cores
        return NativeDecoder(native, num_samples)
    return SideBySide(lambda samples: NativeDecoder(native, samples), num_samples, parts)


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
        return _as_array(logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float())


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
        self._table_VV = _as_array(model.table.weight)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        return self._table_VV[ids_BS[:, -1]]


class SideBySide:
    """Many samples, divided among as many threads as there are parts."""

    def __init__(self, make: Callable[[int], Decoder], num_samples: int, parts: int) -> None:
        sizes = [len(part) for part in np.array_split(np.arange(num_samples), parts)]
        self._decoders = list(map(make, sizes))
        self._borders = np.cumsum(sizes)[:-1]
        self._pool = ThreadPoolExecutor(parts - 1)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        ids_PS, *rest = np.split(ids_BS, self._borders)
        # This thread takes a part too: one that waits has to be woken, which takes its time.
        others = [
            self._pool.submit(decoder.logits, other_PS, known)
            for decoder, other_PS in zip(self._decoders[1:], rest, strict=True)
        ]
        first = self._decoders[0].logits(ids_PS, known)
        return np.concatenate([first, *(other.result() for other in others)])


def _as_array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
