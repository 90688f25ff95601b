"""Decoders of a model in memory: in C where they can be, else the model itself, on any device.

Axes as in next_token.py.
"""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import torch
from torch import nn

from attnlm.base.events import Note, OnEvent, ignore
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.compute.threads import flush_subnormals
from attnlm.generation.native_decoder import decoders_from_weights
from attnlm.generation.next_token import Array, Ids, NewDecoder
from attnlm.model.inspection import is_as_built
from attnlm.model.language_model import LanguageModel, without_gradients
from attnlm.model.layers import LayerCache
from attnlm.model.spec import is_ours, own_code_reason


def decoders_of(model: LanguageModel, device: Device, on_event: OnEvent = ignore) -> NewDecoder:
    """Return the fastest decoders of a model on a device. All give equal logits up to rounding.

    If the decoder in C does not compute the model, a Note says so, and the model itself decodes.
    """
    weights = {name: p.detach() for name, p in model.named_parameters()}
    is_single = all(weight.dtype == torch.float32 for weight in weights.values())
    if (device.name, device.dtype) == ("cpu", "float32") and is_single:
        if is_ours(model.spec) and is_as_built(model):
            arrays = {name: weight.numpy() for name, weight in weights.items()}
            made = decoders_from_weights(model.spec, model.vocab_size, lambda: arrays)
            if made is not None:
                return made
        elif native_library() is not None:
            reason = own_code_reason(model.spec) or "it was changed from outside"
            words = f"the decoder in C does not compute this model ({reason})"
            on_event(Note(f"{words}, so the model itself generates the text, which is slower"))
    decoded_model = _with_bfloat16_linear(model, device)
    return lambda _: ModuleDecoder(decoded_model, device)


def _with_bfloat16_linear(model: LanguageModel, device: Device) -> LanguageModel:
    """Return the model, or its copy with bfloat16 linear maps if the device computes in bfloat16.

    With the model itself, autocast would cast the weights again for every token.
    """
    if device.dtype != "bfloat16":
        return model
    model = copy.deepcopy(model).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # An LM head that shares the embeddings' weight gets a copy: they stay in float32.
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(weight.bfloat16(), requires_grad=False))
    return model


def _attention_kernels(device: Device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which PyTorch uses attention kernels that suit any length of the cache.

    cuDNN plans its kernel anew for each length, which takes longer than many tokens.
    """
    if device.name != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: contextlib.AbstractContextManager[object] = sdpa_kernel(kernels)
    return context


class ModuleDecoder:
    """A decoder that calls the model itself, on any device, with a cache of keys and values."""

    def __init__(self, model: LanguageModel, device: Device) -> None:
        self._model = model
        self._device = device
        self._caches: list[LayerCache] | None = None if model.spec.codes else []

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return the next token's logits, (B, V), in float64. The cache must hold the
        first `known` tokens of the window `ids_BS`."""
        flush_subnormals()
        # An attention from outside may keep nothing in its cache: it computes all tokens again.
        caches = self._caches or []
        if self._caches is None or any(cache.length != known for cache in caches):
            known = 0
            for cache in caches:  # their memory is used again
                cache.length = 0
        ids = torch.from_numpy(np.ascontiguousarray(ids_BS[:, known:])).to(self._device.torch)
        quiet = without_gradients(self._model)
        with quiet, self._device.autocast(), _attention_kernels(self._device):
            logits_BV = self._model.next_logits(ids, self._caches)
        array: Array = logits_BV.cpu().double().numpy()
        return array
