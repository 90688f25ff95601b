"""The loss over the validation split or a part, always at the same windows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnlm.base.signals import StopSignal
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE, Processes, noticing_lost
from attnlm.compute.threads import compute_all, new_pool, threads_of_torch
from attnlm.data.batches import check_length
from attnlm.data.dataset import Ids, ids_at
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops import Kernels, using
from attnlm.training.memory import windows_at_once
from attnlm.training.one_layer import one_layer_form
from attnlm.training.step import MOST_SHARES

# Of a longer split, only the first MOST_TOKENS tokens are evaluated; commands say so.
MOST_TOKENS = 2**22


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per token over `tokens` predicted tokens."""

    loss: float
    tokens: int
    bits_per_byte: float

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
    kernels: Kernels | None = None,
    threads: int = 1,
    most: int | None = None,
    processes: Processes = ALONE,
    is_sharded: bool = False,
    stop: StopSignal | None = None,
) -> Evaluation:
    """Return the mean loss of predicting every token of a split except the first.

    Windows of block_size follow each other without overlap; the last may be shorter. If `most` is
    not None, only about `most` tokens are evaluated, in windows spread evenly over the split. If
    `kernels` is None, PyTorch's kernels are used. Processes and threads divide the windows among
    themselves. The numbers of processes and threads do not change the result. Raises AttnlmError if
    the split is too short for one window or has ids that the model lacks, and Interrupted in all
    processes if one receives a signal.
    """
    stop, kernels, was_training = stop or StopSignal(), kernels or Kernels(), model.training
    inputs, targets, rest = _windows(tokens, most, model)
    at_once = windows_at_once(model.architecture, model.vocab_size, device.name)
    groups = [
        (inputs[first : first + at_once], targets[first : first + at_once])
        for first in range(0, len(inputs), at_once)
    ]
    if len(rest) > 1:
        groups.append((rest[None, :-1], rest[None, 1:]))
    rank, count = processes.rank, processes.count
    sums = torch.zeros(len(groups) + 1, dtype=torch.float64)
    model.eval()
    if is_sharded:
        ours = groups[rank::count]
        # To compute a group, all processes have to gather the weights together. A process that has
        # no group left therefore computes the first group again.
        more = groups[:1] * (-(-len(groups) // count) - len(ours))
        with noticing_lost(), torch.no_grad():
            losses = _summed_losses(model, [*ours, *more], device, None, kernels)
        sums[rank:-1:count] = losses[: len(ours)]
    else:
        threads = max(1, min(threads, len(groups) // count, MOST_SHARES))
        threads = threads if device.name == "cpu" else 1
        step = count * threads

        def compute(first: int) -> None:
            with torch.inference_mode():
                ours = groups[first::step]
                sums[first:-1:step] = _summed_losses(model, ours, device, at_once, kernels, stop)

        with threads_of_torch(1), new_pool(threads) as pool:
            jobs = [functools.partial(compute, rank + i * count) for i in range(threads)]
            compute_all(jobs, pool)
    model.train(was_training)
    sums[-1] = stop.has_come
    processes.add_up(sums, "an evaluation")
    if sums[-1]:
        stop.agree()
        stop.check()
    # Summed in the order of the text: the sum does not depend on how the groups were divided.
    total = sum(sums[:-1].tolist())
    predicted = inputs.size + len(rest) - 1
    loss = total / predicted
    return Evaluation(loss, predicted, loss / math.log(2) / bytes_per_token)


def _windows(tokens: Ids, most: int | None, model: LanguageModel) -> tuple[Ids, Ids, Ids]:
    """Return inputs and targets, each (windows, block_size), and the ids that remain.

    The first remaining id is used only as an input, since it was already a target.
    """
    length = model.architecture.block_size
    check_length(len(tokens), length, "validation")
    if most is None or most >= len(tokens) - 1:
        ids = ids_at(tokens, slice(MOST_TOKENS), model.vocab_size, "val.bin")
        end = (len(ids) - 1) // length * length
        inputs, targets = ids[:end], ids[1 : end + 1]
        return inputs.reshape(-1, length), targets.reshape(-1, length), ids[end:]
    whole = (len(tokens) - 1) // length
    chosen = min(whole, max(1, most // length))
    starts = np.arange(chosen) * whole // chosen * length
    places = starts[:, None] + np.arange(length + 1)
    windows = ids_at(tokens, places, model.vocab_size, "val.bin")
    return windows[:, :-1], windows[:, 1:], windows[-1, -1:]


def _summed_losses(
    model: LanguageModel,
    groups: Sequence[tuple[Ids, Ids]],
    device: Device,
    at_once: int | None,
    kernels: Kernels,
    stop: StopSignal | None = None,
) -> Tensor:
    """Return the summed loss of each group of windows, in float64.

    If the model has a one-layer form and `at_once` is not None, this form computes the groups of
    `at_once` whole windows. After a signal, no further group is computed, since the result will
    not be used.
    """
    form, whole = None, (at_once, model.architecture.block_size)
    if at_once is not None and groups and groups[0][0].shape == whole:
        form = one_layer_form(model, at_once, device, kernels)
    sums = torch.zeros(len(groups), dtype=torch.float64)
    with using(kernels), device.autocast():
        for i, group in enumerate(groups):
            if stop is not None and stop.has_come:
                break
            inputs_BT, targets_BT = (
                torch.from_numpy(ids.astype(np.int64)).to(device.torch) for ids in group
            )
            computing = model if form is None or inputs_BT.shape != whole else form
            sums[i] = float(computing.loss(inputs_BT, targets_BT)) * targets_BT.numel()
    return sums
