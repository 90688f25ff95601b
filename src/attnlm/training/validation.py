"""The loss over the whole validation split, at fixed windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.data.batches import check_length
from attnlm.data.dataset import Ids, ids_at
from attnlm.model.language_model import LanguageModel
from attnlm.training.memory import windows_at_once
from attnlm.training.one_layer import one_layer_form

# A split longer than this is evaluated on its first part; whoever prints the loss says so.
MOST_TOKENS = 2**22


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per token over `tokens` predicted tokens."""

    loss: float
    tokens: int
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return math.exp(min(self.loss, 700.0))


@torch.inference_mode()
def validation_loss(
    model: LanguageModel,
    tokens: Ids,
    device: Device,
    *,
    bytes_per_token: float,
    compile: str = "off",
    most: int | None = None,
) -> Evaluation:
    """Mean loss of predicting every token of a split but its first.

    Windows of block_size follow each other without overlap; the last may be shorter. With `most`
    there are no more whole ones than have so many tokens, spread evenly over the split. `compile`
    is that of the training. Raises AttnlmError when the split is too short for one window, or has
    ids that the model lacks.
    """
    inputs, targets, rest = _windows(tokens, most, model)
    whole = len(inputs)
    at_once = windows_at_once(model.architecture, model.vocab_size, device.name)
    form = one_layer_form(model, at_once, device, compile) if whole >= at_once else None
    training = model.training
    model.eval()
    total = 0.0
    for first in range(0, whole, at_once):
        part = slice(first, first + at_once)
        if form is not None and first + at_once <= whole:
            batch = inputs[part], targets[part]
            total += float(form.loss(*map(_as_tensor, batch))) * inputs[part].size
        else:
            total += _summed_loss(model, inputs[part], targets[part], device)
    if len(rest) > 1:
        total += _summed_loss(model, rest[None, :-1], rest[None, 1:], device)
    model.train(training)
    count = inputs.size + len(rest) - 1
    loss = total / count
    return Evaluation(loss, count, loss / math.log(2) / bytes_per_token)


def _windows(tokens: Ids, most: int | None, model: LanguageModel) -> tuple[Ids, Ids, Ids]:
    """Inputs and targets, each (windows, block_size), and the ids after them, the first known."""
    length = model.architecture.block_size
    check_length(len(tokens), length, "validation")
    if most is None or most >= len(tokens) - 1:
        tokens = ids_at(tokens, slice(MOST_TOKENS), model.vocab_size, "val.bin")
        end = (len(tokens) - 1) // length * length
        inputs, targets = tokens[:end], tokens[1 : end + 1]
        return inputs.reshape(-1, length), targets.reshape(-1, length), tokens[end:]
    whole = (len(tokens) - 1) // length
    chosen = min(whole, max(1, most // length))
    starts = np.arange(chosen) * whole // chosen * length
    places = starts[:, None] + np.arange(length + 1)
    windows = ids_at(tokens, places, model.vocab_size, "val.bin")
    return windows[:, :-1], windows[:, 1:], windows[-1, -1:]


def _summed_loss(model: LanguageModel, inputs: Ids, targets: Ids, device: Device) -> float:
    inputs_BT, targets_BT = (_as_tensor(ids).to(device.torch) for ids in (inputs, targets))
    with device.autocast():
        loss = model.loss(inputs_BT, targets_BT)
    return float(loss) * targets.size


def _as_tensor(ids: Ids) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))
