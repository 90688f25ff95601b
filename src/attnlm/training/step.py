"""One training step after another."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.signals import Interruption
from attnlm.compute.device import Device
from attnlm.config.settings import Config, TrainingConfig
from attnlm.data.batches import Batches, step_seed
from attnlm.data.dataset import Dataset
from attnlm.model.language_model import LanguageModel
from attnlm.training.one_layer import one_layer_form
from attnlm.training.state import TrainingState


def training_batches(config: Config, dataset: Dataset) -> Batches:
    """The batches that a configuration asks for."""
    training = config.training
    assert training.seed is not None
    stride = None if training.sampling == "random" else training.stride or config.model.block_size
    return Batches(
        dataset.train,
        block_size=config.model.block_size,
        batch_size=training.batch_size,
        stride=stride,
        seed=training.seed,
        vocab_size=dataset.vocab_size,
    )


class StepNotFiniteError(Exception):
    """Numbers have become NaN or infinite: which, and after which step."""


class Stepper:
    """One training step after another: everything that a step needs, held ready."""

    def __init__(self, state: TrainingState, config: Config, dataset: Dataset) -> None:
        self.state, self.config = state, config.training
        self.batches = training_batches(config, dataset)
        self._backpropagate = _backpropagation(state, self.config)
        self._draws = bool(config.model.dropout)
        self._loss_sum = torch.full((), state.loss_sum, device=state.device.torch)
        self._sound_step = state.step

    def step(self, interruption: Interruption) -> Tensor:
        """Makes the next step and returns its loss, a tensor () still on the device."""
        state = self.state
        if self._draws:
            torch.manual_seed(step_seed(self.batches.seed, state.step))
        inputs_BT, targets_BT = (_on(array, state.device) for array in self.batches(state.step))
        loss = self._backpropagate(inputs_BT, targets_BT)
        with interruption.shield():
            state.optimizer.step(state.step)
            self._loss_sum += loss
            state.step += 1
        return loss

    def read_loss_sum(self) -> float:
        """The sum of losses since the newest evaluation.

        Raises StepNotFiniteError unless it, the weights and the optimizer's state are finite.
        """
        total = self._loss_sum.item()
        wrong = [] if math.isfinite(total) else ["loss"]
        if wrong := wrong + self.state.optimizer.not_finite():
            raise StepNotFiniteError(self._when(wrong))
        self._sound_step = self.state.step
        return total

    def _when(self, wrong: list[str]) -> str:
        first, last = self._sound_step + 1, self.state.step
        when = f"at step {last}" if first >= last else f"between steps {first} and {last}"
        names = " and ".join(filter(None, [", ".join(wrong[:-1]), wrong[-1]]))
        are = "is no longer a finite number" if len(wrong) == 1 else "are no longer finite numbers"
        return f"{names} {are}: it happened {when}"

    def reset_loss_sum(self) -> None:
        """Starts a new mean."""
        self._loss_sum.zero_()


Backpropagation = Callable[[Tensor, Tensor], Tensor]


def _backpropagation(state: TrainingState, config: TrainingConfig) -> Backpropagation:
    """Inputs and targets, each (B, T) → their loss; the gradients are added to the parameters'."""
    model = state.model
    if config.compile != "on":
        form = one_layer_form(model, config.batch_size, state.device, config.compile)
        if form is not None:
            return form
    compute_loss = torch.compile(_loss) if config.compile == "on" else _loss

    def backpropagate(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with state.device.autocast():
            loss = compute_loss(model, inputs_BT, targets_BT)
        loss.backward()
        return loss.detach()

    return backpropagate


def _loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model.loss(inputs_BT, targets_BT)


def _on(array: NDArray[np.int64], device: Device) -> Tensor:
    return torch.from_numpy(array).to(device.torch, non_blocking=True)
