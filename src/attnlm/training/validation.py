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
) -> Evaluation:
    """Mean loss of predicting every token of a split but its first.

    Windows of block_size follow each other without overlap; the last may be shorter. `compile` is
    that of the training. Raises AttnlmError when the split is too short for one window, or has ids
    that the model lacks.
    """
    tokens = ids_at(tokens, slice(MOST_TOKENS), model.vocab_size, "val.bin")
    block_size = model.architecture.block_size
    check_length(len(tokens), block_size, "validation")
    whole = (len(tokens) - 1) // block_size
    inputs = tokens[: whole * block_size].reshape(whole, block_size)
    targets = tokens[1 : whole * block_size + 1].reshape(whole, block_size)
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
    rest = slice(whole * block_size, len(tokens))
    if len(tokens[rest]) > 1:
        total += _summed_loss(model, tokens[rest][None, :-1], tokens[rest][None, 1:], device)
    model.train(training)
    loss = total / (len(tokens) - 1)
    return Evaluation(loss, len(tokens) - 1, loss / math.log(2) / bytes_per_token)


def _summed_loss(model: LanguageModel, inputs: Ids, targets: Ids, device: Device) -> float:
    inputs_BT, targets_BT = (_as_tensor(ids).to(device.torch) for ids in (inputs, targets))
    with device.autocast():
        loss = model.loss(inputs_BT, targets_BT)
    return float(loss) * targets.size


def _as_tensor(ids: Ids) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))
