"""Decoders, which compute the logits of the next token by the fastest exact form of a model.

Every form gives the logits of the model's forward pass up to rounding. Axes: B samples, S tokens of
the window, T new tokens in it, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from attnlm.base.readable import quantity
from attnlm.compute.choices import fastest
from attnlm.compute.device import Device
from attnlm.compute.native import library
from attnlm.compute.threads import cores
from attnlm.generation.native_decoder import NativeDecoder, NativeModel
from attnlm.generation.next_token import Array, Ids, Uniforms
from attnlm.model.language_model import Bigram, LanguageModel

_TOKENS_TRIED = 16
_WORTH = 0.1
"""The smallest fraction of a token's time that more threads have to save."""
_FEWEST_SHARED = 2**18
"""The fewest weights in a model's maps for several threads to decode a token: with fewer weights,
synchronizing the threads takes longer than the token."""


@dataclass(frozen=True)
class Decoding:
    """A way to decode a model, with a function that makes a decoder for any number of samples."""

    new_decoder: Callable[[int], Decoder]
    threads: int = 1
    """The number of threads among which samples can be divided, with a decoder in each."""

    def parts(self, num_samples: int) -> list[range]:
        """Return the samples of each thread. More threads would not save time.

        Some of each token's work is in Python, where only one thread runs at a time: two
        threads save time from 16 samples on, and twice the threads need four times the samples.
        """
        parts = max(1, min(self.threads, math.isqrt(num_samples) // 2))
        borders = [num_samples * part // parts for part in range(parts + 1)]
        return list(map(range, borders, borders[1:]))


def fastest_decoding(model: LanguageModel, device: Device) -> Decoding:
    """Return the fastest exact way to decode on a device."""
    is_single = all(p.dtype == torch.float32 for p in model.parameters())
    is_native = (device.name, device.dtype) == ("cpu", "float32") and is_single
    compiled = library("decoding.c") if is_native and not isinstance(model, Bigram) else None
    if compiled is None or isinstance(model, Bigram):
        cast = _cast(model, device)
        return Decoding(lambda _: ModuleDecoder(cast, device))
    native = NativeModel(model, compiled)
    threads = _threads_for_a_token(native)

    def new_decoder(samples: int) -> NativeDecoder:
        return NativeDecoder(native, samples, threads if native.is_large or samples == 1 else 1)

    # Threads that divide samples among them do not wait for each other.
    return Decoding(new_decoder, 1 if native.is_large else cores())


def _cast(model: LanguageModel, device: Device) -> LanguageModel:
    """Return the model with the weights already cast that autocast would cast for every token."""
    if device.dtype != "bfloat16":
        return model
    model = copy.deepcopy(model).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # The embeddings, which a head may share, stay in float32.
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(weight.bfloat16(), requires_grad=False))
    return model


def _threads_for_a_token(native: NativeModel) -> int:
    """Return the number of threads that decode a token fastest. Results do not depend on it."""
    everything = cores()
    if everything == 1 or native.numbers < _FEWEST_SHARED:
        return 1
    if native.is_large:
        return everything

    def tokens_by(threads: int) -> Callable[[], object]:
        decoder, uniforms = NativeDecoder(native, 1, threads), Uniforms(0, range(1))
        return lambda: list(decoder.generate([0], _TOKENS_TRIED, 1.0, uniforms))

    a = native.architecture
    sizes = f"{a.model}, {quantity(native.numbers)} weights, context {a.block_size}"
    ways = {str(count): tokens_by(count) for count in (1, everything)}
    return int(fastest("threads for a token", sizes, ways, worth=_WORTH))


class ModuleDecoder:
    """A decoder that calls the model itself, on any device, with a cache of keys and values."""

    def __init__(self, model: LanguageModel, device: Device) -> None:
        self._model, self._device, self._caches = model, device, model.new_caches()

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return logits (B, V), in float32 at least, after a window whose first `known` tokens are
        in the cache."""
        if known == 0:
            for cache in self._caches:
                cache.clear()
        ids = torch.from_numpy(np.ascontiguousarray(ids_BS[:, known:])).to(self._device.torch)
        with torch.inference_mode(), self._device.autocast():
            logits_BV = self._model.next_logits(ids, self._caches)
        is_double = logits_BV.dtype == torch.float64
        array: Array = (logits_BV if is_double else logits_BV.float()).cpu().contiguous().numpy()
        return array


Decoder = ModuleDecoder | NativeDecoder
