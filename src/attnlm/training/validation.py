"""The loss over the validation split or a part, always at the same windows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.process import StopSignal
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE
from attnlm.compute.threads import computing, new_pool, threads_of_torch
from attnlm.config.training import TrainingConfig
from attnlm.data.batches import check_length
from attnlm.data.dataset import Dataset, Ids, evenly_spaced, ids_at
from attnlm.data.examples import IGNORED, Examples, limit_per_window
from attnlm.model.language_model import LanguageModel, evaluating, without_gradients
from attnlm.model.spec import ModelSpec
from attnlm.training.one_layer import one_layer_form
from attnlm.training.schedule import MOST_TOKENS
from attnlm.training.step import MOST_REPLICAS, Stepper

# Tokens of an evaluation that are computed together: enough for matmuls at full speed and, on a
# CPU, few enough for its caches. If a token takes more than _BYTES_PER_TOKEN, they are fewer.
_TOKENS_AT_ONCE = {"cpu": 2**11, "mps": 2**13, "cuda": 2**15}
_BYTES_PER_TOKEN = 2**16
_FLOAT = 4  # bytes


def windows_at_once(spec: ModelSpec, vocab_size: int, device: str) -> int:
    """Return how many windows of block_size an evaluation computes together, at least 1."""
    costs = spec.costs(vocab_size)
    numbers = costs.peak_activations if costs.width else 2 * vocab_size
    per_token = max(_BYTES_PER_TOKEN, _FLOAT * numbers)
    return max(1, _TOKENS_AT_ONCE[device] * _BYTES_PER_TOKEN // per_token // spec.block_size)


class Split(NamedTuple):
    """A validation split, and which of its tokens count."""

    tokens: Ids
    bytes_per_token: float = 0.0
    """bytes of text for each token that counts; 0 for ids that are no text"""
    examples: Examples | None = None
    """of questions with answers; None for a text"""
    only_answers: bool = False
    """True if the tokens of questions do not count"""

    @classmethod
    def of(cls, dataset: Dataset, training: TrainingConfig) -> Split:
        """Return the validation split of a data set, with the tokens that a training counts."""
        examples = limit_per_window(dataset.val_examples, training.examples_per_window)
        if examples is None or training.loss_on == "all":
            return cls(dataset.val, dataset.bytes_per_token, examples)
        return cls(dataset.val, dataset.bytes_per_answer_token, examples, only_answers=True)

    def windows(self, length: int) -> int:
        """Return how many windows of `length` tokens the split has."""
        if self.examples is not None:
            return len(self.examples.packed(length))
        return (len(self.tokens) - 1) // length


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per token over `tokens` predicted tokens; of examples, only answers may count.

    `accuracy` is the share of examples whose answers are right when decoded greedily; None for a
    text. `longer_accuracy` is that of a task's longer examples; None if the context is too short.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    accuracy: float | None = None
    longer_accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        """Return e to the power of the loss."""
        return math.exp(min(self.loss, 700.0))


def validation_loss(
    model: LanguageModel,
    split: Split,
    training: TrainingConfig,
    most: int | None = None,
    stepper: Stepper | None = None,
) -> Evaluation:
    """Return the mean loss of predicting every token of a split except the first.

    Windows of block_size follow each other without overlap; the last may be shorter. If the split
    has examples, windows hold whole examples instead. If `most` is not None, only about `most`
    tokens are evaluated, in evenly spaced windows. The device, its precision, the threads and the
    one-layer form in C are those of `training`. The processes of a `stepper` divide the windows
    among themselves, as threads do; their numbers do not change the result.

    Raises AttnlmError if the split is too short for one window or has ids that the model lacks, and
    Interrupted in all processes of the stepper if one receives a signal.
    """
    processes = ALONE if stepper is None else stepper.processes
    stop = StopSignal() if stepper is None else stepper.stop
    at_once = windows_at_once(model.spec, model.vocab_size, training.device)
    groups = [
        (inputs[first : first + at_once], targets[first : first + at_once])
        for inputs, targets in _all_windows(split, most, model)
        for first in range(0, len(inputs), at_once)
    ]
    count = processes.count
    threads = max(1, min(training.threads or 1, len(groups) // count, MOST_REPLICAS))
    if training.device != "cpu":
        threads = 1
    numbers = np.zeros(len(groups) + 1)  # the sums of losses, and pending signals
    sum_losses = functools.partial(_sum_losses, model, training, groups, at_once, stop, numbers)
    jobs = [
        functools.partial(sum_losses, range(first, len(groups), threads * count))
        for first in range(processes.rank, processes.rank + threads * count, count)
    ]
    with (
        evaluating(model),
        threads_of_torch(1),
        new_pool(threads) as pool,
        computing(jobs[1:], pool) as others,
    ):
        jobs[0]()
        others()
    numbers[-1] = stop.has_come
    processes.all_reduce(torch.from_numpy(numbers))  # in the same memory
    if numbers[-1]:
        stop.agree_to_stop()
        stop.check()
    # Summed in the order of the text: the sum does not depend on how the groups were divided.
    predicted = sum(map(_count_targets, groups))
    loss = sum(numbers[:-1].tolist()) / max(1, predicted)
    bits = loss / math.log(2) / split.bytes_per_token if split.bytes_per_token else None
    return Evaluation(loss, predicted, bits)


Windows = tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]
"""Inputs and targets of some windows, (windows, T) each."""


def _count_targets(windows: Windows) -> int:
    return int(np.count_nonzero(windows[1] >= 0))


def _sum_losses(
    model: LanguageModel,
    training: TrainingConfig,
    groups: Sequence[Windows],
    at_once: int,
    stop: StopSignal,
    sums: NDArray[np.float64],
    numbers: range,
) -> None:
    """Write the sums of the losses in the groups of these `numbers`, until a signal comes."""
    device = Device(training.device, training.dtype)
    form = one_layer_form(model, at_once, device) if training.compile == "native" else None
    with without_gradients(model), device.autocast():
        for number in numbers:
            if stop.has_come:
                break
            group = groups[number]
            inputs_BT, targets_BT = (
                torch.from_numpy(ids.astype(np.int64)).to(device.torch) for ids in group
            )
            if form is not None and inputs_BT.shape == (at_once, model.block_size):
                # It counts ignored targets too.
                sums[number] = float(form.loss(inputs_BT, targets_BT)) * targets_BT.numel()
            else:
                sums[number] = float(model.loss(inputs_BT, targets_BT)) * _count_targets(group)


def windows_of(split: Split, length: int, most: int, vocab_size: int) -> Windows:
    """Return the inputs and targets of at most `most` windows of `length` tokens, evenly spaced.

    Windows of a text follow each other without overlap; others hold whole examples. Raises
    AttnlmError for ids that a vocabulary of this size lacks.
    """

    def read(places: NDArray[np.int64]) -> NDArray[Any]:
        return ids_at(split.tokens, places, vocab_size, "val.bin")

    if split.examples is not None:
        firsts = split.examples.packed(length)
        firsts = firsts[evenly_spaced(len(firsts), most)]
        return split.examples.windows(read, firsts, length, split.only_answers)
    starts = evenly_spaced(split.windows(length), most) * length
    ids = read(starts[:, None] + np.arange(length + 1))
    return ids[:, :-1], ids[:, 1:]


def _all_windows(split: Split, most: int | None, model: LanguageModel) -> Iterator[Windows]:
    """Yield windows of block_size, then the rest of a text, a shorter window."""
    length, tokens = model.block_size, split.tokens
    windows = max(1, (MOST_TOKENS if most is None else most) // length)
    if split.examples is not None:
        inputs, targets = windows_of(split, length, windows, model.vocab_size)
        if not (targets != IGNORED).any():
            raise AttnlmError(
                f"the context of {length} tokens ends before every answer of the validation split",
                f"use a model with `block_size` {split.examples.longest - 1}",
            )
        yield inputs, targets
        return
    check_length(len(tokens), length, "validation")
    is_whole = most is None or most >= len(tokens) - 1
    if is_whole:
        tokens = tokens[:MOST_TOKENS]
    yield windows_of(Split(tokens), length, windows, model.vocab_size)
    if is_whole and (rest := (len(tokens) - 1) % length):
        # The first id is only an input, since it was already a target.
        ids = ids_at(tokens, slice(-1 - rest, None), model.vocab_size, "val.bin")[None]
        yield ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def right_answers(
    model: LanguageModel, tokens: Ids, examples: Examples, device: Device, most: int | None = None
) -> NDArray[np.bool_]:
    """Return for each example whether greedy decoding gives exactly its answers, (E,).

    Greedy decoding of a question gives the answer if and only if each token of the answer is the
    likeliest after the tokens before it, which one forward pass shows. Each example stands alone.
    Later questions of a conversation follow the right answers, not the model's. An example that is
    longer than the context counts as wrong. If `most` is not None, only that many examples, spread
    evenly over the split, are computed and returned.
    """
    chosen = evenly_spaced(len(examples), len(examples) if most is None else most)
    lengths = (examples.ends - examples.starts)[chosen] - 1  # of inputs
    is_right = lengths <= model.block_size
    order = np.argsort(lengths, kind="stable")[: int(is_right.sum())]  # those that fit come first
    at_once = windows_at_once(model.spec, model.vocab_size, device.name)
    alone = replace(examples, most=1)

    def read(places: NDArray[np.int64]) -> NDArray[Any]:
        return ids_at(tokens, places, model.vocab_size, "val.bin")

    with evaluating(model), device.autocast():
        for first in range(0, len(order), at_once):
            batch = order[first : first + at_once]
            length = int(lengths[batch[-1]])
            inputs, targets = alone.windows(read, chosen[batch], length, only_answers=True)
            likeliest = model(torch.from_numpy(inputs).to(device.torch)).argmax(-1).cpu().numpy()
            is_right[batch] = ((likeliest == targets) | (targets == IGNORED)).all(1)
    return is_right
