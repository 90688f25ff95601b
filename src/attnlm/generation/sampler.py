"""Samplers: the texts of a run's model, in whole characters, or token by token with probabilities.

A run whose model the decoder in C or a table computes is sampled without loading torch.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, ignore
from attnlm.compute.device import Device, has_gpu_driver
from attnlm.generation.batch import Batch, group_texts
from attnlm.generation.decoders import (
    NewDecoder,
    blocks_of_tokens,
    decoders_from_weights,
    draw_tokens,
    is_fastest_on_cpu,
    is_known,
)
from attnlm.generation.next_token import Ids, normalised
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.spec import ModelSpec
from attnlm.runs.load_model import has_usual_classes, load_model, load_weights
from attnlm.runs.run import Checkpoint, Run, open_run
from attnlm.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from attnlm.model.language_model import LanguageModel

_RUNNERS_UP = 3  # listed beside each drawn token
_MOST_CACHED = 2**28
"""The most numbers in the caches of texts that are continued together, 1 GiB in float32."""


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

    def generate(self, ids: Sequence[int], config: SamplingConfig) -> Iterator[Ids]:
        """Yield the next ids of all samples after `ids`, in blocks (T, B) of some milliseconds."""
        count = config.num_samples
        return self._blocks(Batch([ids] * count, range(count), config, self.spec.block_size))

    def _blocks(self, batch: Batch) -> Iterator[Ids]:
        return blocks_of_tokens(self.new_decoder(len(batch.start)), batch, self.spec)

    def stream(self, ids: list[int], config: SamplingConfig) -> Iterator[str]:
        """Yield the text that continues `ids`, in whole characters; append its ids to the list."""
        assert config.num_samples == 1
        continuation = Continuation(self.tokenizer, config)
        for block_TB in self.generate(ids, config):
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
        batch = Batch([ids], [0], config, self.spec.block_size)
        for next_B, p_BV in draw_tokens(self.new_decoder(1), batch, self.spec):
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
        windows = [prompt for prompt in prompts for _ in range(config.num_samples)]
        continuations = [Continuation(self.tokenizer, config) for _ in windows]
        pieces: list[list[str]] = [[] for _ in windows]
        costs = self.spec.costs(self.tokenizer.vocab_size)
        cached = costs.layers * self.spec.block_size * costs.cached
        most = max(1, _MOST_CACHED // (cached + self.tokenizer.vocab_size))
        for texts in group_texts(windows, self.spec.block_size, config.tokens, most):
            numbers = [text % config.num_samples for text in texts]
            batch = Batch([windows[i] for i in texts], numbers, config, self.spec.block_size)
            unfinished, steps = dict(enumerate(texts)), 0
            for block_TB in self._blocks(batch):
                rows = block_TB.T.tolist()
                for row, text in list(unfinished.items()):
                    new_ids = batch.drawn_tokens(row, rows[row], steps)
                    pieces[text].append(continuations[text].add(new_ids))
                    if continuations[text].has_ended:
                        del unfinished[row]
                steps += len(block_TB)
                if not unfinished:
                    break
        for text, continuation in enumerate(continuations):
            pieces[text].append(continuation.close())
        return [*map("".join, pieces)], sum(c.tokens for c in continuations)


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
    if device == "cpu" and is_known(spec) and has_usual_classes(opened):
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
