"""The loss and gradient that one thread computes, for its windows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.caches import use_own_compiler_cache
from attnlm.compute.device import Device
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.data.batches import window_seeds
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drawing_from
from attnlm.model.ops import using
from attnlm.training.kernels import kernels_of
from attnlm.training.one_layer import one_layer_form
from attnlm.training.optimizer import FlatOptimizer
from attnlm.training.state import TrainingState

# The most shares of a micro-batch. One thread sums the gradients of all shares.
MOST_SHARES = 8


class Cut(NamedTuple):
    """The division of a process's rows of a batch. `micro_batches` is the number of micro-batches,
    which are computed one after another. `shares` is the number of shares of each micro-batch, one
    per thread. `windows` is the number of windows in each share."""

    micro_batches: int
    shares: int
    windows: int

    @property
    def at_once(self) -> int:
        """Return the number of windows in a micro-batch."""
        return self.shares * self.windows

    @property
    def rows(self) -> int:
        """Return the number of windows of a batch that a process computes."""
        return self.micro_batches * self.at_once


def cut_batch(training: TrainingConfig, threads: int) -> Cut:
    """Cut a batch into as few micro-batches as `micro_batch_size` allows, and each into shares.

    If a micro-batch has fewer shares than threads, PyTorch uses several threads in each share.
    """
    rows = training.batch_size // training.processes
    most = training.micro_batch_size or rows
    micro_batches = next(n for n in range(-(-rows // most), rows + 1) if rows % n == 0)
    at_once = rows // micro_batches
    possible = range(min(threads, at_once, MOST_SHARES), 0, -1)
    shares = next(n for n in possible if threads % n == 0 and at_once % n == 0)
    if training.compile == "on" or training.is_sharded:
        shares = 1
    return Cut(micro_batches, shares, at_once // shares)


class Share:
    """The model of one thread. All threads use the same weights, but separate gradients."""

    def __init__(self, state: TrainingState, config: Config, windows: int, *, first: bool) -> None:
        training = config.training
        self._device, self._seed, self._windows = state.device, training.seed or 0, windows
        self._model, self.gradient = state.model, state.optimizer.gradient
        if not first:
            assert isinstance(state.optimizer, FlatOptimizer)
            self._model, self.gradient = state.optimizer.replica(state.model)
        self._kernels = kernels_of(training)
        self._form = None
        if not training.is_sharded and training.lora is None:
            self._form = one_layer_form(self._model, self._windows, state.device, self._kernels)
        self._loss = _compiled_anew() if training.compile == "on" else _loss
        self._generators: list[torch.Generator] = []
        self._draws = bool(config.model.dropout)
        if self._draws and state.device.name == "cpu" and training.compile != "on":
            self._generators = [torch.Generator() for _ in range(self._windows)]

    def __call__(
        self, step: int, first: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> Tensor:
        """Return the mean loss of the windows, (), and add its gradient to `gradient`.

        `first` is the index of the first window in the batch.
        """
        if self._draws:
            self._seed_dropout(step, first)
        inputs_BT, targets_BT = (_on(self._device, ids) for ids in (inputs, targets))
        if self._form is not None:
            return self._form(inputs_BT, targets_BT)
        # The context includes the backward pass, which may compute a block again.
        with using(self._kernels), drawing_from(self._generators):
            with self._device.autocast():
                loss = self._loss(self._model, inputs_BT, targets_BT)
            loss.backward()
        return loss.detach()

    def _seed_dropout(self, step: int, first: int) -> None:
        """Make dropout depend only on seed, step and window."""
        seeds = window_seeds(self._seed, step, first, self._windows)
        if not self._generators:
            torch.manual_seed(seeds[0])
        for generator, seed in zip(self._generators, seeds, strict=False):
            generator.manual_seed(seed)


def _compiled_anew() -> Callable[[LanguageModel, Tensor, Tensor], Tensor]:
    """Return the loss function, to be compiled at the first step.

    PyTorch compiles the same function for a few models at most, and runs it uncompiled for further
    models. The compiled code of earlier training runs of this process is therefore discarded.
    """
    use_own_compiler_cache()
    torch._dynamo.reset()
    return torch.compile(_loss)


def _loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model.loss(inputs_BT, targets_BT)


def _on(device: Device, ids: NDArray[np.int64]) -> Tensor:
    """Return ids as a tensor on a device.

    CUDA copies pinned memory asynchronously. Other GPUs might then read memory that is already
    reused, so the copy to other GPUs is synchronous.
    """
    if device.name != "cuda":
        return torch.from_numpy(ids).to(device.torch)
    pinned = torch.from_numpy(np.ascontiguousarray(ids)).pin_memory()
    return pinned.to(device.torch, non_blocking=True)
