"""The loss over the validation split or a part, always at the same windows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.signals import StopSignal
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE, Processes
from attnlm.compute.threads import compute_all, new_pool, threads_of_torch
from attnlm.data.batches import check_length
from attnlm.data.dataset import Ids, evenly_spaced, ids_at
from attnlm.data.examples import IGNORED, Examples
from attnlm.model.language_model import LanguageModel, without_gradients
from attnlm.model.layers import evaluating
from attnlm.training.batch_split import MOST_REPLICAS, windows_at_once
from attnlm.training.one_layer import one_layer_form

# Of a longer split, only the first MOST_TOKENS tokens are evaluated; commands say so.
MOST_TOKENS = 2**22


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per token over `tokens` predicted tokens; of examples, only answers may count.

    `accuracy` is the share of examples whose answers are right when decoded greedily; None for a
    text.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        """Return e to the power of the loss."""
        return math.exp(min(self.loss, 700.0))


def validation_loss(
    model: LanguageModel,
    tokens: Ids,
    device: Device,
    *,
    bytes_per_token: float,
    native: bool = False,
    threads: int = 1,
    most: int | None = None,
    processes: Processes = ALONE,
    stop: StopSignal | None = None,
    examples: Examples | None = None,
    only_answers: bool = False,
) -> Evaluation:
    """Return the mean loss of predicting every token of a split except the first.

    Windows of block_size follow each other without overlap; the last may be shorter. If the split
    consists of `examples`, windows hold whole examples instead, and if `only_answers` is true, only
    the tokens of answers count. If `most` is not None, only about `most` tokens are evaluated, in
    evenly spaced windows. If `native` is true, the one-layer form in C computes a model that has
    one. Processes and threads divide the windows among themselves, and their numbers do not change
    the result.

    Raises AttnlmError if the split is too short for one window or has ids that the model lacks, and
    Interrupted in all processes if one receives a signal.
    """
    stop = stop or StopSignal()
    at_once = windows_at_once(model.spec, model.vocab_size, device.name)
    if examples is None:
        groups = _groups_of_text(tokens, most, model, at_once)
    else:
        groups = _groups_of_examples(tokens, examples, most, model, at_once, only_answers)
    count = processes.count
    threads = max(1, min(threads, len(groups) // count, MOST_REPLICAS))
    if device.name != "cpu":
        threads = 1
    firsts = range(processes.rank, processes.rank + threads * count, count)
    sum_losses = functools.partial(_sum_losses, model, device, native, groups, at_once, stop)
    with evaluating(model), threads_of_torch(1), new_pool(threads) as pool:
        numbers_of = [range(first, len(groups), threads * count) for first in firsts]
        results = compute_all([functools.partial(sum_losses, n) for n in numbers_of], pool)
    sums = {number: loss for result in results for number, loss in result.items()}
    sums_and_stop = [*(sums.get(n, 0.0) for n in range(len(groups))), stop.has_come]
    numbers = torch.tensor(sums_and_stop, dtype=torch.float64)
    processes.all_reduce(numbers)
    if numbers[-1]:
        stop.agree_to_stop()
        stop.check()
    # Summed in the order of the text: the sum does not depend on how the groups were divided.
    predicted = sum(map(_count_targets, groups))
    loss = sum(numbers[:-1].tolist()) / max(1, predicted)
    bits = loss / math.log(2) / bytes_per_token if bytes_per_token else None
    return Evaluation(loss, predicted, bits)


_Group = tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]
"""Inputs and targets of some windows, (windows, T) each."""


def _count_targets(group: _Group) -> int:
    return int(np.count_nonzero(group[1] >= 0))


def _sum_losses(
    model: LanguageModel,
    device: Device,
    native: bool,
    groups: Sequence[_Group],
    at_once: int,
    stop: StopSignal,
    numbers: range,
) -> dict[int, float]:
    """Return the sum of the losses in each group of `numbers`, until a signal comes."""
    full = (at_once, model.block_size)
    form = None
    if native and groups[0][0].shape == full:
        form = one_layer_form(model, at_once, device)
    sums = {}
    with without_gradients(model), device.autocast():
        for number in numbers:
            if stop.has_come:
                break
            group = groups[number]
            inputs_BT, targets_BT = (
                torch.from_numpy(ids.astype(np.int64)).to(device.torch) for ids in group
            )
            if form is not None and inputs_BT.shape == full:  # which counts ignored targets too
                sums[number] = float(form.loss(inputs_BT, targets_BT)) * targets_BT.numel()
            else:
                sums[number] = float(model.loss(inputs_BT, targets_BT)) * _count_targets(group)
    return sums


def _groups_of_text(
    tokens: Ids, most: int | None, model: LanguageModel, at_once: int
) -> list[_Group]:
    """Return inputs and targets, each (windows, block_size), in groups of `at_once` windows.

    The last groups are smaller: one has fewer windows, and one is a shorter window.
    """
    length = model.block_size
    check_length(len(tokens), length, "validation")
    if most is None or most >= len(tokens) - 1:
        ids = ids_at(tokens, slice(MOST_TOKENS), model.vocab_size, "val.bin")
        end = (len(ids) - 1) // length * length
        inputs = ids[:end].reshape(-1, length)
        targets = ids[1 : end + 1].reshape(-1, length)
        last_window = ids[end:]  # the first id is only an input, since it was already a target
    else:
        possible = (len(tokens) - 1) // length
        starts = evenly_spaced(possible, max(1, most // length)) * length
        places = starts[:, None] + np.arange(length + 1)
        windows = ids_at(tokens, places, model.vocab_size, "val.bin")
        inputs = windows[:, :-1]
        targets = windows[:, 1:]
        last_window = windows[0, :0]
    firsts = range(0, len(inputs), at_once)
    groups: list[_Group] = [(inputs[i : i + at_once], targets[i : i + at_once]) for i in firsts]
    if len(last_window) > 1:
        groups.append((last_window[None, :-1], last_window[None, 1:]))
    return groups


def _groups_of_examples(
    tokens: Ids,
    examples: Examples,
    most: int | None,
    model: LanguageModel,
    at_once: int,
    only_answers: bool,
) -> list[_Group]:
    """Return inputs and targets of windows of whole examples, in groups of `at_once` windows."""
    length = model.block_size
    firsts = examples.packed(length)
    windows = MOST_TOKENS // length if most is None else max(1, most // length)
    firsts = firsts[evenly_spaced(len(firsts), windows)]

    def read(places: NDArray[np.int64]) -> NDArray[Any]:
        return ids_at(tokens, places, model.vocab_size, "val.bin")

    inputs, targets = examples.windows(read, firsts, length, only_answers)
    if not (targets != IGNORED).any():
        raise AttnlmError(
            f"the context of {length} tokens ends before every answer of the validation split",
            f"use a model with `block_size` {examples.longest - 1}",
        )
    starts = range(0, len(inputs), at_once)
    return [(inputs[i : i + at_once], targets[i : i + at_once]) for i in starts]


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
    begins = examples.starts[chosen]
    ends = examples.ends[chosen]
    lengths = ends - begins - 1  # of inputs
    is_right = lengths <= model.block_size
    order = [int(i) for i in np.argsort(lengths, kind="stable") if is_right[i]]
    at_once = windows_at_once(model.spec, model.vocab_size, device.name)
    with evaluating(model), device.autocast():
        for first in range(0, len(order), at_once):
            batch = order[first : first + at_once]
            length = int(lengths[batch[-1]])
            places = begins[batch, None] + np.arange(length + 1)
            is_answer = examples.is_answer[np.minimum(places, len(tokens) - 1)]
            is_answer &= places < ends[batch, None]
            ids = ids_at(tokens, np.minimum(places, len(tokens) - 1), model.vocab_size, "val.bin")
            inputs_BT = torch.from_numpy(ids[:, :-1].astype(np.int64)).to(device.torch)
            likeliest = model(inputs_BT).argmax(-1).cpu().numpy()
            is_right[batch] = ((likeliest == ids[:, 1:]) | ~is_answer[:, 1:]).all(1)
    return is_right
