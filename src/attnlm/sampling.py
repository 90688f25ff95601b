"""From a checkpoint to text: next-token choice, the context's window, and streams of text."""

from __future__ import annotations

import codecs
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnlm.decoding import Decoder, PlainDecoder, new_decoder
from attnlm.decoding_numpy import Array, Ids
from attnlm.device import Device
from attnlm.errors import NotFiniteError, UsageError
from attnlm.events import Note, OnEvent, ignore
from attnlm.model import LanguageModel
from attnlm.run import Run, load_model, open_run
from attnlm.tokenizer import Tokenizer

Probabilities = NDArray[np.float64]

MOST_HELD = 2**26
"""Tokens, of all samples, where none is shown before the last is drawn: about 2 GB."""
MOST_CHOICES_HELD = 2**20
"""The same for tokens with their probabilities, and those of others."""


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
        if self.num_samples > 1:
            most = MOST_HELD // max(1, self.tokens)
            words = f"at most {max(1, most)} with --tokens {self.tokens}: all are held in memory"
            self._require(self.num_samples <= most, "num_samples", words)
        self._require(0 <= self.seed < 2**63, "seed", "0 or more, below 2^63")

    def _require(self, holds: bool, name: str, words: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} can't be {getattr(self, name)}", f"it must be {words}")


def drawn_seed() -> int:
    """A seed for whoever gave none; say it, so that the text can be had again."""
    return secrets.randbits(31)


def next_token_probabilities(
    logits_BV: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Probabilities:
    """softmax(logits / temperature), cut to the top_k likeliest and then to the nucleus, (B, V).

    Temperature 0 puts everything on the likeliest token. The nucleus is the smallest set of the
    likeliest tokens whose probabilities sum to at least top_p (Holtzman et al., 2020). Computed in
    float64, and what is left sums to 1. Raises NotFiniteError for logits that are NaN or infinite.
    """
    with np.errstate(all="ignore"):
        return _normalised(_next_token_weights(logits_BV, temperature, top_k, top_p))


def _next_token_weights(
    logits_BV: Array, temperature: float, top_k: int | None, top_p: float | None
) -> Probabilities:
    """`next_token_probabilities` but for a factor."""
    logits_BV = logits_BV.astype(np.float64)
    # A sum in float64 of float32 numbers can't overflow: it is finite where all of them are.
    if not math.isfinite(np.add.reduce(logits_BV, None)):
        raise NotFiniteError
    if temperature == 0:
        likeliest_BV = np.zeros_like(logits_BV)
        np.put_along_axis(likeliest_BV, logits_BV.argmax(-1, keepdims=True), 1, axis=-1)
        return likeliest_BV
    # The largest logit becomes 0, so that no temperature however small overflows.
    logits_BV -= np.maximum.reduce(logits_BV, -1, keepdims=True)
    if temperature != 1:
        logits_BV /= temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        dropped = np.argpartition(logits_BV, -top_k, axis=-1)[:, :-top_k]
        np.put_along_axis(logits_BV, dropped, -np.inf, axis=-1)
    weights_BV = np.exp(logits_BV, logits_BV)
    if top_p is not None and top_p < 1:
        weights_BV = _normalised(weights_BV)
        places = np.argsort(-weights_BV, axis=-1, kind="stable")
        ordered = np.take_along_axis(weights_BV, places, -1)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        np.put_along_axis(weights_BV, places, ordered, -1)
    return weights_BV


def _normalised(weights_BV: Probabilities) -> Probabilities:
    return weights_BV / np.add.reduce(weights_BV, -1, keepdims=True)


def draw(weights_BV: Probabilities, uniforms_B: Probabilities) -> Ids:
    """The token where the running sum passes a share of the whole, drawn from [0, 1), (B,).

    The weights are probabilities but for a factor; a token of weight 0 is never drawn.
    """
    sums_BV = np.add.accumulate(weights_BV, -1)
    totals_B = sums_BV[:, -1]
    # Rounding must not lift the product to the total itself.
    wanted_B = np.minimum(uniforms_B * totals_B, np.nextafter(totals_B, 0))
    drawn_B: Ids = (sums_BV > wanted_B[:, None]).argmax(-1)
    return drawn_B


class Uniforms:
    """For each sample a stream of numbers in [0, 1) of its own: a function of (seed, sample)."""

    def __init__(self, seed: int, num_samples: int) -> None:
        keys = [np.random.SeedSequence([seed, sample]) for sample in range(num_samples)]
        self._streams = [np.random.Generator(np.random.Philox(key)) for key in keys]
        self._ahead = self._rows()

    def next(self) -> Probabilities:
        """The next number of every sample, float64 (B,)."""
        return next(self._ahead)

    def _rows(self) -> Iterator[Probabilities]:
        # Many at once: a call for a single number takes longer than drawing it.
        count = max(1, 2**16 // max(64, len(self._streams)))
        while True:
            yield from np.stack([stream.random(count) for stream in self._streams], axis=1)


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


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    device: Device,
    *,
    cached: bool = True,
) -> Iterator[Ids]:
    """Yields `config.tokens` times the next ids of all samples, (B,)."""
    for next_B, _ in _drawn_tokens(model, prompt, config, device, cached=cached):
        yield next_B


def _drawn_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    device: Device,
    *,
    cached: bool = True,
) -> Iterator[tuple[Ids, Probabilities]]:
    """Yields `config.tokens` times the next ids (B,), and by which weights they were drawn, (B, V).

    What is known of the tokens before is used again while the window stands still, where that is
    exact. `cached=False` computes everything anew each time with the model itself: the plain path
    that the others are tested against.
    """
    assert prompt, "there is always a first token"
    block_size, count = model.config.block_size, config.num_samples
    uniforms = Uniforms(config.seed, count)
    decoder: Decoder = PlainDecoder(model, device)
    if cached:
        with np.errstate(all="ignore"):  # what overflows is found in the logits
            decoder = new_decoder(model, device, config.tokens, count)
    kept = np.array(prompt[-block_size:], dtype=np.int64)
    # Room for two windows: what lies before the newest one is dropped when the room is used up.
    ids_BT = np.empty((count, 2 * block_size), dtype=np.int64)
    ids_BT[:, : len(kept)] = kept
    start, known, length = 0, 0, len(kept)
    for _ in range(config.tokens):
        if (moved := window_start(model, length, start)) != start:
            start, known = moved, 0
        with np.errstate(all="ignore"):
            logits_BV = decoder.logits(ids_BT[:, start:length], known)
            weights_BV = _next_token_weights(
                logits_BV, config.temperature, config.top_k, config.top_p
            )
            next_B = draw(weights_BV, uniforms.next())
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
    """A model that is ready to speak: loaded once, asked as often as you like."""

    model: LanguageModel
    tokenizer: Tokenizer
    device: Device

    def prompt_ids(self, prompt: str) -> list[int]:
        """The prompt's ids; without one a newline, else the end-of-text id, else id 0.

        Raises AttnlmError naming the characters that the vocabulary lacks.
        """
        if prompt:
            return self.tokenizer.encode(prompt)
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
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        drawn = _drawn_tokens(self.model, ids, config, self.device)
        for count, (next_B, weights_BV) in enumerate(drawn, 1):
            ids.append(int(next_B[0]))
            content = self.tokenizer.decode_bytes([ids[-1]])
            yield self._choice(
                ids[-1],
                _normalised(weights_BV)[0],
                decoder.decode(content, final=count == config.tokens),
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
        columns = list(generate(self.model, ids, config, self.device))
        rows = np.stack(columns, axis=1).tolist() if columns else [[]] * config.num_samples
        return [self.tokenizer.decode(row) for row in rows]


def load_sampler(run: Run, *, checkpoint: str = "auto", device: str = "auto") -> Sampler:
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
    1. A seed that is not given is drawn and reported as a Note. Raises AttnlmError (UsageError
    where the arguments are wrong) at the call, before the first piece.
    """
    if num_samples != 1:
        raise UsageError(
            f"sample gives one text, piece by piece, and num_samples is {num_samples}",
            "for several texts, call attnlm.samples(run, num_samples=N)",
        )
    config = _config(tokens, temperature, top_k, top_p, 1, seed, on_event)
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

    Each begins with the prompt; the first is the text that `sample` gives for the same seed. A seed
    that is not given is drawn and reported as a Note. Raises AttnlmError (UsageError where the
    arguments are wrong).
    """
    config = _config(tokens, temperature, top_k, top_p, num_samples, seed, on_event)
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    sampler = load_sampler(opened, checkpoint=checkpoint, device=device)
    return [prompt + text for text in sampler.samples(sampler.prompt_ids(prompt), config)]


def _config(
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    num_samples: int,
    seed: int | None,
    on_event: OnEvent | None,
) -> SamplingConfig:
    """Checked, with a seed that is drawn and reported where none is given."""
    config = SamplingConfig(
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_samples=num_samples,
        seed=drawn_seed() if seed is None else seed,
    )
    if seed is None:
        (on_event or ignore)(Note(f"seed {config.seed}"))
    return config


def _pieces(sampler: Sampler, prompt: str, ids: list[int], config: SamplingConfig) -> Iterator[str]:
    if prompt:
        yield prompt
    yield from sampler.stream(ids, config)
