"""From a checkpoint to text: next-token choice, the context's window, and streams of text."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnlm.base.errors import UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.compute.device import Device
from attnlm.compute.threads import FlushingHere
from attnlm.generation.decoders import Decoder, Decoding, PlainDecoder, fastest_decoding
from attnlm.generation.native_decoder import NativeDecoder, kept_of_full_window
from attnlm.generation.next_token import (
    Ids,
    Probabilities,
    Uniforms,
    draw,
    next_token_weights,
    normalised,
)
from attnlm.generation.sampling_config import SamplingConfig, drawn_seed
from attnlm.model.language_model import LanguageModel
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Checkpoint, Run
from attnlm.tokens.tokenizer import Tokenizer


def window_start(model: LanguageModel, length: int, start: int) -> int:
    """Return where the context of token `length` begins, given where the last one began."""
    a = model.architecture
    return start if length - start <= a.block_size else length - kept_of_full_window(a)


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    device: Device,
    *,
    cached: bool = True,
) -> Iterator[Ids]:
    """Yields `config.tokens` times the next ids of all samples, (B,).

    What is known of the tokens before is used again while the window stands still, where that is
    exact. `cached=False` computes everything anew each time with the model itself: the plain path
    that the others are tested against.
    """
    plain = Decoding(lambda _: PlainDecoder(model, device))
    decoding = fastest_decoding(model, device) if cached else plain
    samples = range(config.num_samples)
    yield from _next_ids(model, prompt, config, decoding, samples)


def generate_all(
    model: LanguageModel, prompt: Sequence[int], config: SamplingConfig, device: Device
) -> Ids:
    """All that `generate` yields, (B, tokens), by threads that do not wait for each other."""
    decoding, stopped = fastest_decoding(model, device), threading.Event()

    def rows(samples: range) -> Ids:
        made_BT = np.empty((len(samples), config.tokens), dtype=np.int64)
        for t, next_B in enumerate(_next_ids(model, prompt, config, decoding, samples)):
            made_BT[:, t] = next_B
            if stopped.is_set():
                break
        return made_BT

    first, *others = decoding.parts(config.num_samples)
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        try:
            futures = [pool.submit(rows, samples) for samples in others]
            return np.concatenate([rows(first), *(future.result() for future in futures)])
        finally:
            stopped.set()


def _next_ids(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    decoding: Decoding,
    samples: range,
) -> Iterator[Ids]:
    """Yield `config.tokens` times the next ids of these samples, (B,)."""
    decoder, uniforms = decoding.new_decoder(len(samples)), Uniforms(config.seed, samples)
    if isinstance(decoder, NativeDecoder) and config.takes_all(model.vocab_size):
        yield from decoder.generate(prompt, config.tokens, config.temperature, uniforms)
        return
    for next_B, _ in drawn_tokens(model, prompt, config, decoder, uniforms, len(samples)):
        yield next_B


def drawn_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    decoder: Decoder,
    uniforms: Uniforms,
    count: int,
) -> Iterator[tuple[Ids, Probabilities]]:
    """Yield `config.tokens` times the next ids of `count` samples, (B,), and the weights that they
    were drawn by, (B, V)."""
    assert prompt, "there is always a first token"
    block_size = model.architecture.block_size
    kept = np.array(prompt[-block_size:], dtype=np.int64)
    # Room for two windows: what lies before the newest one is dropped when the room is used up.
    ids_BT = np.empty((count, 2 * block_size), dtype=np.int64)
    ids_BT[:, : len(kept)] = kept
    start, known, length = 0, 0, len(kept)
    for _ in range(config.tokens):
        if (moved := window_start(model, length, start)) != start:
            start, known = moved, 0
        with np.errstate(all="ignore"), FlushingHere():
            logits_BV = decoder.logits(ids_BT[:, start:length], known)
            weights_BV = next_token_weights(
                logits_BV, config.temperature, config.top_k, config.top_p
            )
            next_B = draw(weights_BV, uniforms.take(1)[0])
        known = length - start
        if length == ids_BT.shape[1]:
            ids_BT[:, :known] = ids_BT[:, start:length].copy()
            start, length = 0, known
        ids_BT[:, length] = next_B
        length += 1
        yield next_B, weights_BV


@dataclass(frozen=True)
class Choice:
    """A token that was drawn, its probability among those that it was drawn from, and others."""

    token: str
    probability: float
    runners_up: list[tuple[str, float]]
    """the likeliest of the other tokens, none of probability 0"""
    text: str
    """what it adds to the text, on whole characters"""

    def facts(self) -> dict[str, object]:
        """As JSON values."""
        others = [{"token": token, "probability": p} for token, p in self.runners_up]
        return {"token": self.token, "probability": self.probability, "runners_up": others}


_RUNNERS_UP = 3


@dataclass(frozen=True)
class Sampler:
    """A model that is ready to be sampled from, as often as you like."""

    model: LanguageModel
    tokenizer: Tokenizer
    device: Device

    def prompt_ids(self, prompt: str) -> list[int]:
        """The prompt's ids, after the beginning-of-text id where there is one; without a prompt
        that id, else a newline, else the end-of-text id, else id 0.

        Raises AttnlmError naming the characters that the vocabulary lacks.
        """
        if ids := self.tokenizer.encode_from_start(prompt):
            return ids
        for first in (self.tokenizer.newline, self.tokenizer.end_of_text):
            if first is not None:
                return [first]
        return [0]

    def stream(self, ids: list[int], config: SamplingConfig) -> Iterator[str]:
        """Continues `ids`, and extends the list; yields text that ends on whole characters."""
        assert config.num_samples == 1
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for next_B in generate(self.model, ids, config, self.device):
            ids.append(int(next_B[0]))
            if text := decoder.decode(self.tokenizer.decode_bytes([ids[-1]])):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def choices(self, ids: list[int], config: SamplingConfig) -> Iterator[Choice]:
        """Continues `ids` as `stream` does, and says of each token how likely it was.

        Bytes that never complete a character come with the last token.
        """
        assert config.num_samples == 1
        characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder = fastest_decoding(self.model, self.device).new_decoder(1)
        uniforms = Uniforms(config.seed, range(1))
        drawn = drawn_tokens(self.model, ids, config, decoder, uniforms, 1)
        for count, (next_B, weights_BV) in enumerate(drawn, 1):
            ids.append(int(next_B[0]))
            content = self.tokenizer.decode_bytes([ids[-1]])
            yield self._choice(
                ids[-1],
                normalised(weights_BV)[0],
                characters.decode(content, final=count == config.tokens),
            )

    def _choice(self, token: int, probabilities_V: Probabilities, text: str) -> Choice:
        likeliest = np.argsort(-probabilities_V, kind="stable")[: _RUNNERS_UP + 1].tolist()
        others = [other for other in likeliest if other != token and probabilities_V[other] > 0]
        return Choice(
            self.tokenizer.decode([token]),
            float(probabilities_V[token]),
            [(self.tokenizer.decode([i]), float(probabilities_V[i])) for i in others[:_RUNNERS_UP]],
            text,
        )

    def samples(self, ids: list[int], config: SamplingConfig) -> list[str]:
        """Several continuations of `ids`, computed side by side."""
        rows_BT = generate_all(self.model, ids, config, self.device)
        return list(map(self.tokenizer.decode, rows_BT.tolist()))


def load_sampler(
    run: Run, *, checkpoint: str | Checkpoint = "auto", device: str = "auto"
) -> Sampler:
    """The model of a run's checkpoint (auto, best or last), on a device.

    Raises AttnlmError when files are missing or damaged, or the device can't be had.
    """
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)
    return Sampler(model, run.tokenizer, chosen)


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
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Iterator[str]:
    """One text from a trained run (by default the one trained last), piece by piece.

    Yields the prompt and then its continuation, as it is generated:

        for piece in attnlm.sample(run, tokens=100, prompt="Once ", seed=1):
            print(piece, end="", flush=True)

    `"".join(…)` gives the whole text; `samples` gives several, and here `num_samples` can only be
    1. Without `seed` one is drawn and reported as a Note. Raises AttnlmError (UsageError
    for invalid arguments) at the call, before the first piece.
    """
    if num_samples != 1:
        raise UsageError(
            f"sample gives one text, piece by piece, and num_samples is {num_samples}",
            "for several texts, call attnlm.samples(run, num_samples=N)",
        )
    config = SamplingConfig(
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=_seed(seed, on_event),
    )
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    sampler = load_sampler(opened, checkpoint=checkpoint, device=device)
    return _pieces(sampler, prompt, sampler.prompt_ids(prompt), config)


def samples(
    run: str | Path | Run | None = None,
    *,
    num_samples: int,
    tokens: int = 500,
    prompt: str = "",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> list[str]:
    """Several whole texts from a trained run (by default the one trained last), side by side.

        for text in attnlm.samples(run, num_samples=3, tokens=100, prompt="Once ", seed=1):
            print(text, end="\\n---\\n")

    Each begins with the prompt; the first is the text that `sample` gives for the same seed.
    Without `seed` one is drawn and reported as a Note. Raises AttnlmError (UsageError for invalid
    arguments).
    """
    config = SamplingConfig(
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_samples=num_samples,
        seed=_seed(seed, on_event),
    )
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    sampler = load_sampler(opened, checkpoint=checkpoint, device=device)
    return [prompt + text for text in sampler.samples(sampler.prompt_ids(prompt), config)]


def _seed(seed: int | None, on_event: OnEvent | None) -> int:
    """The one that was given, or one that is drawn and reported."""
    if seed is None:
        seed = drawn_seed()
        (on_event or ignore)(Note(f"seed {seed}"))
    return seed


def _pieces(sampler: Sampler, prompt: str, ids: list[int], config: SamplingConfig) -> Iterator[str]:
    if prompt:
        yield prompt
    yield from sampler.stream(ids, config)
