"""The loss over the whole validation split, at fixed windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnlm.batches import check_length
from attnlm.dataset import Dataset, Ids, ids_at, open_dataset
from attnlm.device import Device, choose_device
from attnlm.errors import AttnlmError, NotFiniteError
from attnlm.memory import windows_at_once
from attnlm.model import LanguageModel, cross_entropy
from attnlm.one_layer import written_out
from attnlm.optimizer import lay_side_by_side
from attnlm.run import Run, load_model, open_dataset_of, open_run

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
        """e to the loss: between how many tokens the model hesitates."""
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
    block_size = model.config.block_size
    check_length(len(tokens), block_size, "validation")
    whole = (len(tokens) - 1) // block_size
    inputs = tokens[: whole * block_size].reshape(whole, block_size)
    targets = tokens[1 : whole * block_size + 1].reshape(whole, block_size)
    at_once = windows_at_once(model.config, model.vocab_size, device.name)
    form = written_out(model, at_once, device, compile) if whole >= at_once else None
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
        loss = cross_entropy(model(inputs_BT), targets_BT)
    return float(loss) * targets.size


def _as_tensor(ids: Ids) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def evaluate(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
    data: str | Path | Dataset | None = None,
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
) -> Evaluation:
    """The loss of a run's checkpoint over the whole validation split, of `data` if given.

    It is the number that training logged, to the bit on the same machine: parameters lie in memory
    as there, and as many threads compute as precisely. `verify` is that of `open_dataset`. Raises
    AttnlmError when something is missing or damaged, when `data` was encoded by another tokenizer,
    or when the loss is not finite.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if data is None:
        dataset = open_dataset_of(run, Path(data_dir), verify=verify)
    else:
        dataset = open_dataset(data, data_dir=data_dir, verify=verify)
        if dataset.tokenizer.to_json() != run.tokenizer.to_json():
            raise AttnlmError(
                f"{dataset.name} was encoded by another tokenizer than {run.name}'s",
                "a model can only be asked about the ids that it was trained on",
            )
    model, chosen = load_model(run, checkpoint=checkpoint, device=device)
    training = run.config.training
    if chosen.name == training.device:
        chosen = choose_device(chosen.name, training.dtype)
    lay_side_by_side(model, training)
    threads = torch.get_num_threads()
    torch.set_num_threads(training.threads or threads)
    try:
        evaluation = validation_loss(
            model,
            dataset.val,
            chosen,
            bytes_per_token=dataset.bytes_per_token,
            compile=training.compile,
        )
    finally:
        torch.set_num_threads(threads)
    if not math.isfinite(evaluation.loss):
        raise NotFiniteError
    return evaluation
