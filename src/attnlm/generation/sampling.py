"""Texts from a run: the functions `sample` and `samples`, and the Sampler that they load.

A run whose model the decoder in C or a table computes is sampled without loading torch.
"""

from __future__ import annotations

import codecs
import functools
import inspect
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlm.base.errors import UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.setting_fields import describe_settings, fields_of, quoted
from attnlm.base.suggestions import suggestion
from attnlm.compute.device import Device, has_gpu_driver
from attnlm.generation.native_decoder import decoders_from_weights, is_fastest_on_cpu
from attnlm.generation.next_token import Ids, NewDecoder, Probabilities, draw_tokens, normalised
from attnlm.generation.sampling_config import SAMPLING, SamplingConfig, draw_seed
from attnlm.model.spec import ModelSpec, is_ours
from attnlm.runs.load_model import has_usual_classes, load_model, load_weights
from attnlm.runs.run import Checkpoint, Run, open_run
from attnlm.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from attnlm.model.language_model import LanguageModel

_RUNNERS_UP = 3  # listed beside each drawn token
_MOST_CACHED = 2**28
"""The most numbers in the caches of texts that are continued together, 1 GiB in float32."""
_SECONDS_AT_ONCE = 0.05
"""How long several texts are continued before their tokens are decoded, and their ends noticed."""


def sample(
    run: str | Path | Run | None = None,
    *,
    prompt: str = "",
    checkpoint: str = "auto",
    device: str = "auto",
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
    sampler = load_sampler(run, checkpoint=checkpoint, device=device, on_event=on_event)
    pieces = sampler.stream(sampler.prompt_ids(prompt), config)
    return itertools.chain([prompt] if prompt else [], pieces)


def samples(
    run: str | Path | Run | None = None,
    *,
    prompt: str | Sequence[str] = "",
    checkpoint: str = "auto",
    device: str = "auto",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> list[str]:
    """Return several whole texts from a trained run (by default the last trained).

        for text in attnlm.samples(run, num_samples=3, tokens=100, prompt="Once ", seed=1):
            print(text, end="\\n---\\n")

    Each text begins with the prompt and ends as in `sample`; the first one is the text of `sample`
    for the same seed. `prompt` can be a list:

        texts = attnlm.samples(run, prompt=["Once ", "A fox "], tokens=100, seed=1)

    The result then has `num_samples` texts for each prompt, in the order of the prompts. Prompts of
    the same number of tokens are continued together. Each prompt gets the same texts as alone with
    this seed, except where rounding depends on the number of texts: on a GPU, and without the
    kernels in C.

    Without `seed`, a seed is drawn and reported as a Note. Raises AttnlmError (UsageError for
    invalid arguments).
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, Sequence) or not all(isinstance(text, str) for text in prompts):
        hint = "it must be a text or a list of texts"
        raise UsageError(f"invalid value for `prompt`: {quoted(prompt)}", hint)
    config = _sampling_config(settings, on_event)
    sampler = load_sampler(run, checkpoint=checkpoint, device=device, on_event=on_event)
    continued = iter(sampler.samples([*map(sampler.prompt_ids, prompts)], config)[0])
    return [prompt + next(continued) for prompt in prompts for _ in range(config.num_samples)]


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

    spec: ModelSpec
    tokenizer: Tokenizer
    device: str
    new_decoder: NewDecoder

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the ids of a prompt; if the prompt is empty, only the id `tokenizer.first`.

        Raises AttnlmError if the vocabulary lacks characters; the error names them.
        """
        return self.tokenizer.encode_from_start(prompt) or [self.tokenizer.first]

    def generate(
        self, prompts: Sequence[Sequence[int]], streams: Sequence[int], config: SamplingConfig
    ) -> Iterator[tuple[Ids, Probabilities]]:
        """Draw tokens that continue prompts of the same length, as `draw_tokens` does."""
        ids_BS = np.array(prompts, np.int64)
        return draw_tokens(self.new_decoder(len(ids_BS)), ids_BS, streams, config, self.spec)

    def stream(self, ids: list[int], config: SamplingConfig) -> Iterator[str]:
        """Yield the text that continues `ids`, in whole characters; append its ids to the list."""
        return (text for text, _ in self._continued(ids, config) if text)

    def _continued(
        self, ids: list[int], config: SamplingConfig
    ) -> Iterator[tuple[str, Probabilities]]:
        """Append tokens to `ids`; yield each one's text and unnormalised probabilities, (1, V).

        If text is still held back at the end, the last text includes it.
        """
        assert config.num_samples == 1
        continuation = Continuation(self.tokenizer, config)
        for next_B, p_BV in self.generate([ids], [0], config):
            ids.append(int(next_B[0]))
            text = continuation.add(ids[-1:])
            text += continuation.close() if continuation.tokens == config.tokens else ""
            yield text, p_BV
            if continuation.has_ended:
                return

    def choices(self, ids: list[int], config: SamplingConfig) -> Iterator[Choice]:
        """Yield the tokens that continue `ids`, with probabilities; append their ids to the list.

        If text is still held back at the end, the last choice includes it.
        """
        decode = self.tokenizer.decode
        for text, p_BV in self._continued(ids, config):
            token, p_V = ids[-1], normalised(p_BV)[0]
            likeliest = np.argsort(-p_V, kind="stable")[: _RUNNERS_UP + 1].tolist()
            others = [i for i in likeliest if i != token and p_V[i] > 0][:_RUNNERS_UP]
            runners_up = [(decode([i]), float(p_V[i])) for i in others]
            yield Choice(decode([token]), float(p_V[token]), runners_up, text)

    def samples(self, prompts: list[list[int]], config: SamplingConfig) -> tuple[list[str], int]:
        """Return the continuations of each prompt, and the total number of their tokens.

        The first `config.num_samples` texts continue the first prompt. Each prompt gets the same
        texts as alone, up to rounding, which the function `samples` explains. Windows of the same
        length are continued together.
        """
        costs, context = self.spec.costs(self.tokenizer.vocab_size), self.spec.block_size
        windows = [ids[-context:] for ids in prompts for _ in range(config.num_samples)]
        of_length: dict[int, list[int]] = {}
        for number, ids in enumerate(windows):
            of_length.setdefault(len(ids), []).append(number)
        cached = costs.layers * context * costs.cached
        most = max(1, _MOST_CACHED // (cached + self.tokenizer.vocab_size))
        continuations = [Continuation(self.tokenizer, config) for _ in windows]
        texts = [""] * len(windows)
        for numbers in of_length.values():
            for first in range(0, len(numbers), most):
                batch = numbers[first : first + most]
                streams = [number % config.num_samples for number in batch]
                drawn = self.generate([windows[number] for number in batch], streams, config)
                while block := list(_next_steps(drawn)):
                    for number, ids in zip(batch, np.stack(block, 1).tolist(), strict=True):
                        texts[number] += continuations[number].add(ids)
                    if all(continuations[number].has_ended for number in batch):
                        break
        for number, continuation in enumerate(continuations):
            texts[number] += continuation.close()
        return texts, sum(c.tokens for c in continuations)


def _next_steps(drawn: Iterator[tuple[Ids, Probabilities]]) -> Iterator[Ids]:
    """Yield the ids of the next steps, (B,) each, until `_SECONDS_AT_ONCE` have passed."""
    until = time.perf_counter() + _SECONDS_AT_ONCE
    for ids_B, _ in drawn:
        yield ids_B
        if time.perf_counter() >= until:
            return


def load_sampler(
    run: str | Path | Run | None,
    *,
    checkpoint: str | Checkpoint = "auto",
    device: str = "auto",
    on_event: OnEvent | None = None,
) -> Sampler:
    """Return a Sampler with the model of a run's checkpoint (auto, best, last or a step).

    If `device` is auto, a small model is sampled on the CPU, even if there is a GPU. `on_event`
    receives a Note if the model must be decoded in a slower way. Raises AttnlmError if files are
    missing or damaged, or if the device is not available.
    """
    opened = open_run(run)
    spec, vocab_size = opened.config.spec, opened.vocab_size
    chosen = opened.checkpoint(checkpoint)
    if device == "auto" and (is_fastest_on_cpu(spec, vocab_size) or not has_gpu_driver()):
        device = "cpu"
    if device == "cpu" and is_ours(spec) and has_usual_classes(opened):
        read_weights = functools.partial(load_weights, opened, chosen)
        made = decoders_from_weights(spec, vocab_size, read_weights)
        if made is not None:
            return Sampler(spec, opened.tokenizer, device, made)
    model, placed = load_model(opened, checkpoint=chosen, device=device)
    return sampler_of(model, opened.tokenizer, placed, on_event)


def sampler_of(
    model: LanguageModel, tokenizer: Tokenizer, device: Device, on_event: OnEvent | None = None
) -> Sampler:
    """Return a Sampler with a model in memory. `on_event` as in `load_sampler`."""
    from attnlm.generation.module_decoder import decoders_of

    decoders = decoders_of(model, device, on_event or ignore)
    return Sampler(model.spec, tokenizer, device.name, decoders)
