"""Decoders, which compute the logits of the next token, in C or with the model itself, and the
generation of tokens with them: the sliding context, and several samples in threads.

Both decoders give the logits of the model's forward pass up to rounding. Axes: B samples, S tokens
of the window that the model sees, T new tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from attnlm.base.events import Note, OnEvent, ignore
from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.compute.threads import cores, flush_subnormals
from attnlm.generation.batch import Batch, group_texts
from attnlm.generation.native_decoder import NativeDecoder, NativeModel, tokens_kept_when_full
from attnlm.generation.next_token import (
    Array,
    Ids,
    Probabilities,
    draw,
    unnormalised_probabilities,
)
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.attention import LayerCache
from attnlm.model.inspection import is_as_built
from attnlm.model.language_model import LanguageModel, Transformer, without_gradients
from attnlm.model.spec import ModelSpec, Use

_FEWEST_SHARED = 400_000
"""Several threads decode a token only if the model's linear maps have at least this many weights.
With fewer weights, synchronizing the threads takes longer than the token."""
_MOST_ON_CPU = 30_000_000
"""The most weights with which the decoder in C generates a text faster than a GPU, which waits at
each token for the launches of its kernels (docs/speed.md)."""
_MOST_CACHED = 2**28
"""The most numbers in the caches of texts that are continued together, 1 GiB in float32."""


@dataclass(frozen=True)
class Decoding:
    """A way to decode a model, with a function that makes a decoder for any number of samples."""

    model: LanguageModel
    new_decoder: Callable[[int], Decoder]
    threads: int = 1
    """The most threads among which samples are divided. Each thread has a decoder of its own."""

    def divide_samples(self, num_samples: int) -> list[range]:
        """Divide the samples among the fastest number of threads; return the samples of each.

        For each token, some code runs in Python, in only one thread at a time. N threads therefore
        need at least 4 N² samples to save time: two threads need 16 samples, four threads 64.
        """
        threads = max(1, min(self.threads, math.isqrt(num_samples) // 2))
        borders = [num_samples * i // threads for i in range(threads + 1)]
        return list(map(range, borders, borders[1:]))

    def batch(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int], config: SamplingConfig
    ) -> Batch:
        """Return a batch of the model's windows, with a text for each prompt."""
        return Batch(prompts, samples, config, self.model.block_size)

    def generate(self, prompt: Sequence[int], config: SamplingConfig) -> Iterator[Ids]:
        """Yield the next ids of all samples in blocks (T, B). Each gets `config.tokens` ids."""
        count = config.num_samples
        return self._continue(self.batch([prompt] * count, range(count), config))

    def _continue(self, batch: Batch) -> Iterator[Ids]:
        """Yield the next ids of the texts of a batch in blocks (T, B), for all of its steps."""
        top_k = batch.config.top_k
        if (top_k is None or top_k >= self.model.vocab_size) and batch.config.top_p in (None, 1):
            decoder = self.new_decoder(len(batch.start))
            if isinstance(decoder, NativeDecoder):
                return decoder.generate(batch)
        return (next_B[None] for next_B, _ in self.draw_tokens(batch))

    def draw_tokens(self, batch: Batch) -> Iterator[tuple[Ids, Probabilities]]:
        """Draw the next token of each text of a batch, in each of its steps. Each time, yield the
        ids (B,) and the unnormalised probabilities from which they were drawn, (B, V)."""
        flush_subnormals()
        config = batch.config
        decoder = self.new_decoder(len(batch.start))
        window_BS = batch.start
        known = 0
        for _ in range(batch.steps):
            if window_BS.shape[1] > self.model.block_size:
                window_BS = window_BS[:, -tokens_kept_when_full(self.model.spec) :]
                known = 0
            prompt_ids_1B, uniforms_1B = batch.take(1)
            is_drawn_B = prompt_ids_1B[0] < 0
            with np.errstate(all="ignore"):
                logits_BV = decoder.logits(window_BS, known)
                logits_BV[~is_drawn_B] = 0  # they may be infinite
                p_BV = unnormalised_probabilities(
                    logits_BV, config.temperature, config.top_k, config.top_p
                )
                drawn_B = draw(p_BV, uniforms_1B[0])
                next_B = np.where(is_drawn_B, drawn_B, prompt_ids_1B[0])
            known = window_BS.shape[1]
            window_BS = np.concatenate([window_BS, next_B[:, None]], axis=1)
            yield next_B, p_BV

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        config: SamplingConfig,
        receive: Callable[[int, list[int]], bool],
    ) -> None:
        """Continue each prompt by `config.num_samples` texts, many texts at the same time.

        `receive` takes the number of a text and its next ids, and returns True if the text has
        ended. The texts of the first prompt have the first numbers. Several threads call `receive`,
        but only one thread for each text. The threads do not wait for each other.
        """
        prompts = [prompt for prompt in prompts for _ in range(config.num_samples)]
        costs = self.model.spec.costs(self.model.vocab_size)
        cached = costs.layers * self.model.block_size * costs.cached
        most = max(1, _MOST_CACHED // (cached + self.model.vocab_size))
        for texts in group_texts(prompts, self.model.block_size, config.tokens, most):
            self._continue_in_threads(texts, prompts, config, receive)

    def _continue_in_threads(
        self,
        texts: Sequence[int],
        prompts: Sequence[Sequence[int]],
        config: SamplingConfig,
        receive: Callable[[int, list[int]], bool],
    ) -> None:
        """Continue some texts in threads, each of which has a batch of its own."""
        stopped = threading.Event()

        def continue_texts(indices: range) -> None:
            own_texts = texts[indices.start : indices.stop]
            samples = [text % config.num_samples for text in own_texts]
            batch = self.batch([prompts[text] for text in own_texts], samples, config)
            unfinished = set(range(len(own_texts)))
            steps_made = 0
            for block_TB in self._continue(batch):
                rows = block_TB.T.tolist()
                for row in list(unfinished):
                    new_ids = batch.drawn_tokens(row, rows[row], steps_made)
                    has_ended = bool(new_ids) and receive(own_texts[row], new_ids)
                    if has_ended or steps_made + len(block_TB) >= batch.ends[row]:
                        unfinished.remove(row)
                steps_made += len(block_TB)
                if stopped.is_set() or not unfinished:
                    return

        first_indices, *others_indices = self.divide_samples(len(texts))
        with ThreadPoolExecutor(max(1, len(others_indices))) as pool:
            try:
                futures = [pool.submit(continue_texts, indices) for indices in others_indices]
                continue_texts(first_indices)
                for future in futures:
                    future.result()
            finally:
                stopped.set()


def is_fastest_on_cpu(spec: ModelSpec, vocab_size: int) -> bool:
    """Return True if a CPU generates text faster than a GPU."""
    costs = spec.costs(vocab_size)
    if not costs.width:
        return True  # a table of logits
    is_in_c = spec.reason_against(Use.NATIVE_DECODER) is None and native_library() is not None
    return is_in_c and costs.multiplied_weights < _MOST_ON_CPU


def fastest_decoding(model: LanguageModel, device: Device, on_event: OnEvent = ignore) -> Decoding:
    """Return the fastest way to decode on a device. All ways give equal logits up to rounding.

    If the decoder in C does not compute the model, a Note says so, and the model itself decodes.
    """
    if (native := _native_model(model, device, on_event)) is None:
        decoded_model = _with_bfloat16_linear(model, device)
        return Decoding(model, lambda _: ModuleDecoder(decoded_model, device))
    all_cores = cores()
    threads_per_token = all_cores if native.numbers >= _FEWEST_SHARED else 1

    def new_decoder(samples: int) -> NativeDecoder:
        shares_tokens = native.is_large or samples == 1
        return NativeDecoder(native, samples, threads_per_token if shares_tokens else 1)

    # In a small model, each thread decodes samples of its own, without waiting for others.
    return Decoding(model, new_decoder, 1 if native.is_large else all_cores)


def _native_model(model: LanguageModel, device: Device, on_event: OnEvent) -> NativeModel | None:
    """Return the model in the layout of the decoder in C, or None if this decoder can't be used."""
    is_single = all(p.dtype == torch.float32 for p in model.parameters())
    is_native = (device.name, device.dtype) == ("cpu", "float32") and is_single
    has_blocks = model.spec.costs(model.vocab_size).width > 0
    if not has_blocks or not is_native or (library := native_library()) is None:
        return None
    if (reason := model.spec.reason_against(Use.NATIVE_DECODER)) is None:
        if isinstance(model, Transformer) and is_as_built(model):
            return NativeModel(model, library)
        reason = "it was changed from outside"
    words = f"the C decoder does not compute this model ({reason})"
    on_event(Note(f"{words}, so the model itself generates the text, which is slower"))
    return None


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
        has_cache = model.spec.reason_against(Use.CACHE) is None
        self._caches: list[LayerCache] | None = [] if has_cache else None

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """Return the next token's logits, (B, V), in float32 at least. The cache must hold the
        first `known` tokens of the window `ids_BS`."""
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
        is_double = logits_BV.dtype == torch.float64
        array: Array = (logits_BV if is_double else logits_BV.float()).cpu().contiguous().numpy()
        return array


Decoder = ModuleDecoder | NativeDecoder
