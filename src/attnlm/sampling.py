"""From a checkpoint to text: next-token choice, the context's window, and streams of text."""

from __future__ import annotations

import codecs
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.device import Device
from attnlm.errors import UsageError
from attnlm.events import Note, OnEvent, ignore
from attnlm.model import LanguageModel
from attnlm.run import Run, load_model, open_run
from attnlm.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen. Raises UsageError for values that make no sense."""

    tokens: int = 500
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    num_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self._require(self.tokens >= 0, "tokens", "0 or more")
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        self._require(finite, "temperature", "0 (greedy) or more")
        self._require(self.top_k is None or self.top_k >= 1, "top_k", "1 or more")
        self._require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._require(1 <= self.num_samples <= 2**16, "num_samples", f"from 1 to {2**16}")
        self._require(0 <= self.seed < 2**63, "seed", "0 or more, below 2^63")

    def _require(self, holds: bool, name: str, words: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} can't be {getattr(self, name)}", f"it must be {words}")


def drawn_seed() -> int:
    """A seed for whoever gave none; say it, so that the text can be had again."""
    return secrets.randbits(31)


def next_token_probabilities(
    logits_BV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """softmax(logits / temperature), cut to the top_k likeliest and then to the nucleus, (B, V).

    Temperature 0 puts everything on the likeliest token. The nucleus is the smallest set of the
    likeliest tokens whose probabilities sum to at least top_p (Holtzman et al., 2020). Computed in
    float64 on the CPU, and what is left sums to 1.
    """
    logits_BV = logits_BV.detach().cpu().double()
    if temperature == 0:
        return F.one_hot(logits_BV.argmax(-1), logits_BV.size(-1)).double()
    # The largest logit becomes 0, so that no temperature however small overflows.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits_BV.size(-1):
        kept, places = logits_BV.topk(top_k)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, places, kept)
    probabilities_BV = logits_BV.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, places = probabilities_BV.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= top_p] = 0
        probabilities_BV = torch.zeros_like(ordered).scatter(-1, places, ordered)
        probabilities_BV /= probabilities_BV.sum(-1, keepdim=True)
    return probabilities_BV


def draw(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token where the running sum of probabilities passes a number drawn from [0, 1), (B,).

    A token of probability 0 is never drawn.
    """
    sums_BV = probabilities_BV.cumsum(-1)
    total_B1 = sums_BV[:, -1:]
    # Rounding must not lift the number to the total itself.
    wanted_B1 = torch.minimum(uniforms_B[:, None] * total_B1, total_B1.nextafter(0 * total_B1))
    return torch.searchsorted(sums_BV, wanted_B1, right=True).squeeze(-1)


class Uniforms:
    """For each sample a stream of numbers in [0, 1) of its own: a function of (seed, sample)."""

    def __init__(self, seed: int, num_samples: int) -> None:
        keys = [np.random.SeedSequence([seed, sample]) for sample in range(num_samples)]
        self._streams = [np.random.Generator(np.random.Philox(key)) for key in keys]

    def next(self) -> Tensor:
        """The next number of every sample, float64 (B,)."""
        return torch.tensor([stream.random() for stream in self._streams], dtype=torch.float64)


def window_start(model: LanguageModel, length: int, start: int) -> int:
    """Where the context for token number `length` begins, given where the last one's began.

    A full context slides by one token; the transformer's keeps its newer half, so that its cache
    can be filled again and then serves for many tokens.
    """
    block_size = model.config.block_size
    if length - start <= block_size:
        return start
    kept = max(1, block_size // 2) if model.config.model == "transformer" else block_size
    return length - kept


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    device: Device,
    *,
    cached: bool = True,
) -> Iterator[Tensor]:
    """Yields `config.tokens` times the next ids of all samples, (B,), on the CPU.

    Keys and values are cached while the window stands still, where that is exact; once it has
    moved they are computed anew. `cached=False` computes everything anew each time: the plain path
    that the other is tested against.
    """
    assert prompt, "there is always a first token"
    uniforms = Uniforms(config.seed, config.num_samples)
    ids_BT = torch.tensor([list(prompt)] * config.num_samples)
    caches = model.new_caches()
    start = known = max(0, len(prompt) - model.config.block_size)
    ids_BT = ids_BT[:, start:]
    offset = start  # of the first id that is still held
    for _ in range(config.tokens):
        length = offset + ids_BT.size(1)
        moved = window_start(model, length, start)
        if moved != start or not cached:
            for cache in caches:
                cache.clear()
            start = known = moved
            ids_BT, offset = ids_BT[:, start - offset :], start
        new_BT = ids_BT[:, known - offset :].to(device.torch)
        with device.autocast():
            logits_BV = model(new_BT, caches if cached else None)[:, -1]
        known = length
        probabilities_BV = next_token_probabilities(
            logits_BV, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
        )
        next_B = draw(probabilities_BV, uniforms.next())
        ids_BT = torch.cat((ids_BT, next_B[:, None]), dim=1)
        yield next_B


@dataclass(frozen=True)
class Sampler:
    """A model that is ready to speak: loaded once, asked as often as you like."""

    model: LanguageModel
    tokenizer: Tokenizer
    device: Device

    def prompt_ids(self, prompt: str) -> list[int]:
        """The prompt's ids; without one a newline, else the end-of-text id, else id 0.

        Raises AttnlmError naming the characters that the vocabulary lacks.
        """
        if prompt:
            return [int(i) for i in self.tokenizer.encode(prompt)]
        for first in (self.tokenizer.newline, self.tokenizer.end_of_text):
            if first is not None:
                return [first]
        return [0]

    def stream(self, ids: list[int], config: SamplingConfig) -> Iterator[str]:
        """Continues `ids`, and extends the list; yields text that ends on whole characters."""
        assert config.num_samples == 1
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for next_B in generate(self.model, ids, config, self.device):
            ids.append(int(next_B))
            if text := decoder.decode(self.tokenizer.decode_bytes([ids[-1]])):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def samples(self, ids: list[int], config: SamplingConfig) -> list[str]:
        """Several continuations of `ids`, computed side by side."""
        columns = list(generate(self.model, ids, config, self.device))
        rows = torch.stack(columns, dim=1).tolist() if columns else [[]] * config.num_samples
        return [self.tokenizer.decode(row) for row in rows]


def load_sampler(run: Run, *, checkpoint: str = "best", device: str = "auto") -> Sampler:
    """The model of a run's best or last checkpoint, on a device.

    Raises AttnlmError when files are missing or damaged, or the device can't be had.
    """
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)
    return Sampler(model.eval(), run.tokenizer, chosen)


def sample(
    run: str | Path | Run | None = None,
    *,
    tokens: int = 500,
    prompt: str = "",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    num_samples: int = 1,
    checkpoint: str = "best",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Iterator[str]:
    """Text from a trained run (by default the one trained last).

    Yields the prompt and then its continuation, piece by piece; with num_samples above 1, one
    whole sample after the other. Raises AttnlmError (UsageError where the arguments are wrong)
    at the call, before the first piece.
    """
    drawn = drawn_seed() if seed is None else seed
    config = SamplingConfig(
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_samples=num_samples,
        seed=drawn,
    )
    if seed is None:
        (on_event or ignore)(Note(f"seed {drawn}"))
    if not isinstance(run, Run):
        run = open_run(run, checkpoint_dir=Path(checkpoint_dir))
    sampler = load_sampler(run, checkpoint=checkpoint, device=device)
    ids = sampler.prompt_ids(prompt)
    return _texts(sampler, prompt, ids, config)


def _texts(sampler: Sampler, prompt: str, ids: list[int], config: SamplingConfig) -> Iterator[str]:
    if config.num_samples > 1:
        yield from (prompt + text for text in sampler.samples(ids, config))
        return
    if prompt:
        yield prompt
    yield from sampler.stream(ids, config)
