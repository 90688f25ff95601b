"""Logits of the next token: the fastest form of a model that is exact, on its device.

Every form here equals the model's own forward pass up to rounding. Axes: B samples, S tokens of the
window, T new ones among them, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.model.attention import LayerCache
from attnlm.model.language_model import LanguageModel

Array = NDArray[Any]
Ids = NDArray[np.int64]


class Decoder(Protocol):
    """What sampling asks for logits."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """(B, V) for the token after a window, whose first `known` tokens were there before."""


def new_decoder(model: LanguageModel, device: Device, tokens: int, num_samples: int) -> Decoder:
    """The fastest exact form of a model on its device."""
    return CachedDecoder(model, device)


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


def as_array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
