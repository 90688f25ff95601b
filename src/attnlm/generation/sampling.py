"""Sampling of text from a checkpoint: the end of texts, streams of text, each token's choice."""

from __future__ import annotations

import codecs
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.setting_fields import describe_settings, fields_of, quoted
from attnlm.base.suggestions import suggestion
from attnlm.compute.device import Device
from attnlm.generation.decoders import Decoding, fastest_decoding, is_fastest_on_cpu
from attnlm.generation.next_token import normalised
from attnlm.generation.sampling_config import SAMPLING, SamplingConfig, draw_seed
from attnlm.model.language_model import LanguageModel
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Checkpoint, Run, open_run
from attnlm.tokens.tokenizer import Tokenizer

_RUNNERS_UP = 3  # listed beside each drawn token


class Continuation:
    """The text of one sample, decoded in whole characters while its tokens are added.

    The text ends before the first stop text and, unless `ignore_eos`, at the end-of-text id. Text
    that may be the beginning of a stop text is held back until later tokens show what it is.
    """

    def __init__(self, tokenizer: Tokenizer, config: SamplingConfig) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = config.stop_texts
        end_id = None if config.ignore_eos else tokenizer.end_of_text
        self._end_id = -1 if end_id is None else end_id
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held_back = ""
        self.tokens = 0
        """The number of tokens that were added, without tokens after the end of the text."""
        self.has_ended = False

    def add(self, ids: list[int]) -> str:
        """Add tokens; return the new text up to the end, except text that is held back."""
        if self.has_ended:
            return ""
        if self._stop_texts and len(ids) > 1:  # one by one, to count the tokens up to the end
            return "".join(self.add([token]) for token in ids)
        is_end = self._end_id in ids
        ids_of_text = ids[: ids.index(self._end_id)] if is_end else ids
        self.tokens += len(ids_of_text) + is_end
        text = self._released(self._tokenizer.decode_bytes(ids_of_text))
        if is_end:
            text += self.close()
            self.has_ended = True
        return text

    def close(self) -> str:
        """Return the text that was held back, with U+FFFD for bytes of an incomplete character."""
        if self.has_ended:
            return ""
        return self._released(b"", final=True) + self._held_back

    def _released(self, content: bytes, final: bool = False) -> str:
        """Add bytes; return the text up to a stop text, or up to what may begin one."""
        text = self._held_back + self._utf8_decoder.decode(content, final)
        if stops := [text.index(stop) for stop in self._stop_texts if stop in text]:
            self.has_ended = True
            self._held_back = ""
            return text[: min(stops)]
        beginnings = (stop[:length] for stop in self._stop_texts for length in range(1, len(stop)))
        held = max((len(part) for part in beginnings if text.endswith(part)), default=0)
        released = len(text) - held
        self._held_back = text[released:]
        return text[:released]


@dataclass(frozen=True)
class Choice:
    """A token that was drawn, its probability in the draw, and the likeliest other tokens."""

    token: str
    probability: float
    runners_up: list[tuple[str, float]]
    """the likeliest other tokens, without tokens of probability 0"""
    text: str
    """the text that the token adds, in whole characters"""

    def facts(self) -> dict[str, object]:
        """Return the token, its probability and the likeliest other tokens as JSON values."""
        others = [{"token": token, "probability": p} for token, p in self.runners_up]
        return {"token": self.token, "probability": self.probability, "runners_up": others}


@dataclass(frozen=True)
class Sampler:
    """A model that is ready for sampling, any number of times."""

    model: LanguageModel
    tokenizer: Tokenizer
    device: Device
    on_event: OnEvent = ignore
    """receives a Note if the model must be decoded in a slower way"""

    @functools.cached_property
    def decoding(self) -> Decoding:
        """The fastest way to decode the model."""
        return fastest_decoding(self.model, self.device, self.on_event)

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the ids of a prompt; if the prompt is empty, only the id `tokenizer.first`.

        Raises AttnlmError if the vocabulary lacks characters; the error names them.
        """
        return self.tokenizer.encode_from_start(prompt) or [self.tokenizer.first]

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of prompts as `prompt_ids` does. An error has the number of the prompt."""
        ids = []
        for number, prompt in enumerate(prompts, 1):
            try:
                ids.append(self.prompt_ids(prompt))
            except AttnlmError as error:
                if len(prompts) == 1:
                    raise
                raise AttnlmError(f"prompt {number:,}: {error.message}", error.hint) from None
        return ids

    def stream(self, ids: list[int], config: SamplingConfig) -> Iterator[str]:
        """Yield the text that continues `ids`, in whole characters; append its ids to the list."""
        assert config.num_samples == 1
        continuation = Continuation(self.tokenizer, config)
        for block_TB in self.decoding.generate(ids, config):
            new_ids = block_TB[:, 0].tolist()
            before = continuation.tokens
            text = continuation.add(new_ids)
            ids += new_ids[: continuation.tokens - before]
            if text:
                yield text
            if continuation.has_ended:
                return
        if held_back := continuation.close():
            yield held_back

    def choices(self, ids: list[int], config: SamplingConfig) -> Iterator[Choice]:
        """Yield the tokens that continue `ids`, with probabilities; append their ids to the list.

        If text is still held back at the end, the last choice includes it.
        """
        assert config.num_samples == 1
        continuation = Continuation(self.tokenizer, config)
        decode = self.tokenizer.decode
        batch = self.decoding.batch([ids], [0], config)
        for next_B, p_BV in self.decoding.draw_tokens(batch):
            ids.append(token := int(next_B[0]))
            text = continuation.add([token])
            text += continuation.close() if continuation.tokens == config.tokens else ""
            p_V = normalised(p_BV)[0]
            likeliest = np.argsort(-p_V, kind="stable")[: _RUNNERS_UP + 1].tolist()
            others = [i for i in likeliest if i != token and p_V[i] > 0][:_RUNNERS_UP]
            runners_up = [(decode([i]), float(p_V[i])) for i in others]
            yield Choice(decode([token]), float(p_V[token]), runners_up, text)
            if continuation.has_ended:
                return

    def samples(self, prompts: list[list[int]], config: SamplingConfig) -> tuple[list[str], int]:
        """Return the continuations of each prompt, and the total number of their tokens.

        The first `config.num_samples` texts continue the first prompt. Each prompt gets the same
        texts as alone, up to rounding, which the function `samples` explains.
        """
        config.check_room(len(prompts))
        continuations = [Continuation(self.tokenizer, config) for _ in prompts * config.num_samples]
        pieces: list[list[str]] = [[] for _ in continuations]

        def receive(text: int, new_ids: list[int]) -> bool:
            pieces[text].append(continuations[text].add(new_ids))
            return continuations[text].has_ended

        self.decoding.generate_all(prompts, config, receive)
        for text, continuation in enumerate(continuations):
            pieces[text].append(continuation.close())
        return [*map("".join, pieces)], sum(c.tokens for c in continuations)


def load_sampler(
    run: str | Path | Run | None,
    *,
    checkpoint: str | Checkpoint = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
) -> Sampler:
    """Return a Sampler with the model of a run's checkpoint (auto, best or last), on a device.

    If `device` is auto, a small model is sampled on the CPU, even if there is a GPU. `on_event`
    receives a Note if the model must be decoded in a slower way. Raises AttnlmError if files are
    missing or damaged, or if the device is not available.
    """
    opened = open_run(run, checkpoint_dir=checkpoint_dir)
    if device == "auto" and is_fastest_on_cpu(opened.config.spec, opened.vocab_size):
        device = "cpu"
    model, model_device = load_model(opened, checkpoint=checkpoint, device=device)
    return Sampler(model, opened.tokenizer, model_device, on_event or ignore)


def sample(
    run: str | Path | Run | None = None,
    *,
    prompt: str = "",
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Generate one text from a trained run (by default the last trained), piece by piece.

    Yields the prompt, and then its continuation while it is generated:

        for piece in attnlm.sample(run, tokens=100, prompt="Once ", seed=1):
            print(piece, end="", flush=True)

    `"".join(…)` gives the whole text. `samples` returns several texts, and takes several prompts.

    The text ends after `tokens` tokens, or earlier: before the first of the texts in `stop` (a text
    or a list of texts) or, unless `ignore_eos` is set, before the tokenizer's end-of-text token.
    Without `seed`, a seed is drawn and reported as a Note. Raises AttnlmError (UsageError for
    invalid arguments) at the call, before the first piece.
    """
    if not isinstance(prompt, str):
        hint = "it must be a text; attnlm.samples takes a list of texts"
        raise UsageError(f"invalid value for `prompt`: {quoted(prompt)}", hint)
    config = _sampling_config(settings, on_event)
    if config.num_samples != 1:
        raise UsageError(
            f"sample yields one text, but num_samples is {config.num_samples}",
            "for several texts, call attnlm.samples(run, num_samples=N)",
        )
    sampler = load_sampler(
        run, checkpoint=checkpoint, device=device, checkpoint_dir=checkpoint_dir, on_event=on_event
    )
    pieces = sampler.stream(sampler.prompt_ids(prompt), config)
    return itertools.chain([prompt] if prompt else [], pieces)


def samples(
    run: str | Path | Run | None = None,
    *,
    prompt: str | Sequence[str] = "",
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> list[str]:
    """Return several whole texts from a trained run (by default the last trained).

        for text in attnlm.samples(run, num_samples=3, tokens=100, prompt="Once ", seed=1):
            print(text, end="\\n---\\n")

    Each text begins with the prompt and ends as in `sample`; the first one is the text of `sample`
    for the same seed. `prompt` can be a list:

        texts = attnlm.samples(run, prompt=["Once ", "A fox "], tokens=100, seed=1)

    The result then has `num_samples` texts for each prompt, in the order of the prompts. They are
    generated together, whatever the lengths of the prompts. Each prompt gets the same texts as
    alone with this seed, except where rounding depends on the number of texts: on a GPU, without
    the kernels in C, and if a linear layer of the model has 256 inputs or more.

    Without `seed`, a seed is drawn and reported as a Note. Raises AttnlmError (UsageError for
    invalid arguments).
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, Sequence) or not all(isinstance(text, str) for text in prompts):
        hint = "it must be a text or a list of texts"
        raise UsageError(f"invalid value for `prompt`: {quoted(prompt)}", hint)
    config = _sampling_config(settings, on_event)
    sampler = load_sampler(
        run, checkpoint=checkpoint, device=device, checkpoint_dir=checkpoint_dir, on_event=on_event
    )
    return prepend_prompts(prompts, sampler.samples(sampler.encode_prompts(prompts), config)[0])


for _function in (sample, samples):
    _function.__doc__ = f"""{inspect.cleandoc(_function.__doc__ or "")}

Settings:

{describe_settings(SAMPLING, with_defaults=True)}
"""


def _sampling_config(settings: dict[str, Any], on_event: OnEvent | None) -> SamplingConfig:
    """Return the settings of `sample` or `samples`; draw a seed and report it if there is none."""
    names = fields_of(SamplingConfig)
    for name in settings:
        if name not in names:
            hint = suggestion(name, names, f"the settings are {', '.join(names)}")
            raise UsageError(f"unknown setting {name!r}", hint)
    seed = settings.pop("seed", None)
    config = SamplingConfig(**settings, seed=draw_seed() if seed is None else seed)
    if seed is None and on_event is not None:
        on_event(Note(f"seed {config.seed}"))
    return config


def prepend_prompts(prompts: Sequence[str], continued: Sequence[str]) -> list[str]:
    """Return whole texts. Each prompt has the same number of continuations."""
    num_samples = len(continued) // max(1, len(prompts))
    return [prompts[number // num_samples] + text for number, text in enumerate(continued)]
