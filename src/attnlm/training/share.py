"""One thread's share of each batch: the loss of its windows, and their gradient."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.config.settings import Config
from attnlm.data.batches import window_seeds
from attnlm.model.dropout import drawing_from
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops import compiled_parts
from attnlm.training.one_layer import one_layer_form
from attnlm.training.state import TrainingState

# Each share has gradients of its own, which are added up by one thread.
MOST_SHARES = 8


def shares(threads: int, config: Config) -> int:
    """Into how many equal shares a batch is cut: as many as there are threads, where that goes.

    The threads that are left over are PyTorch's own, within each share.
    """
    if config.training.compile == "on":
        return 1
    possible = range(min(threads, config.training.batch_size, MOST_SHARES), 0, -1)
    return next(n for n in possible if threads % n == 0 and config.training.batch_size % n == 0)


class Share:
    """The model as one thread has it: the same weights in memory, gradients of its own."""

    def __init__(self, state: TrainingState, config: Config, count: int, *, first: bool) -> None:
        training = config.training
        self._device, self._seed = state.device, training.seed or 0
        self._windows = training.batch_size // count
        self._model, self.gradient = state.model, state.optimizer.gradient
        if not first:
            self._model, self.gradient = state.optimizer.replica(state.model)
        self._parts = training.compile == "parts"
        self._form = None
        if training.compile != "on":
            self._form = one_layer_form(self._model, self._windows, state.device, training.compile)
        self._loss = torch.compile(_loss) if training.compile == "on" else _loss
        self._generators: list[torch.Generator] = []
        self._draws = bool(config.model.dropout)
        if self._draws and state.device.name == "cpu" and training.compile != "on":
            self._generators = [torch.Generator() for _ in range(self._windows)]

    def __call__(
        self, step: int, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> Tensor:
        """The mean loss of these windows, (); its gradient is added to the share's own.

        They are share `number` of the batch of a step.
        """
        if self._draws:
            self._seed_dropout(step, number)
        inputs_BT, targets_BT = (_on(self._device, ids) for ids in (inputs, targets))
        if self._form is not None:
            return self._form(inputs_BT, targets_BT)
        with (
            compiled_parts(self._parts),
            drawing_from(self._generators),
            self._device.autocast(),
        ):
            loss = self._loss(self._model, inputs_BT, targets_BT)
        loss.backward()
        return loss.detach()

    def _seed_dropout(self, step: int, number: int) -> None:
        """Draws depend on seed, step and window alone."""
        seeds = window_seeds(self._seed, step, number * self._windows, self._windows)
        if not self._generators:
            torch.manual_seed(seeds[0])
        for generator, seed in zip(self._generators, seeds, strict=False):
            generator.manual_seed(seed)


def _loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model.loss(inputs_BT, targets_BT)


def _on(device: Device, ids: NDArray[np.int64]) -> Tensor:
    """A GPU fetches pinned memory by itself while the processor goes on."""
    tensor = torch.from_numpy(ids)
    if device.name == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device.torch, non_blocking=True)
