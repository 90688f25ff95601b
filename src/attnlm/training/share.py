"""The loss and gradient that one thread computes, for its windows of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.caches import use_own_compiler_cache
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
        self._kernels, self._form = kernels_of(training), None
        if not training.is_sharded and training.lora is None:
            self._form = one_layer_form(self._model, windows, state.device, self._kernels)
        self._loss, is_compiled = _loss, training.compile == "on"
        if is_compiled:
            use_own_compiler_cache()
            # PyTorch compiles the same function for a few models at most, and runs it uncompiled
            # for further models: discard the code of earlier training runs of this process.
            torch._dynamo.reset()
            self._loss = torch.compile(_loss)
        self._draws = bool(config.model.dropout)
        own = self._draws and state.device.name == "cpu" and not is_compiled
        self._generators = [torch.Generator() for _ in range(windows if own else 0)]

    def __call__(
        self, step: int, first: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> Tensor:
        """Return the mean loss of the windows, (), and add its gradient to `gradient`.

        `first` is the index of the first window in the batch.
        """
        if self._draws:  # dropout depends only on seed, step and window
            seeds = window_seeds(self._seed, step, first, self._windows)
            if not self._generators:
                torch.manual_seed(seeds[0])
            for generator, seed in zip(self._generators, seeds, strict=False):
                generator.manual_seed(seed)
        on_cuda = self._device.name == "cuda"
        ids = [torch.from_numpy(some) for some in (inputs, targets)]
        # CUDA copies pinned memory asynchronously. Other GPUs might then read memory that is
        # already reused.
        ids = [some.contiguous().pin_memory() for some in ids] if on_cuda else ids
        inputs_BT, targets_BT = (i.to(self._device.torch, non_blocking=on_cuda) for i in ids)
        if self._form is not None:
            return self._form(inputs_BT, targets_BT)
        # The context includes the backward pass, which may compute a block again.
        with using(self._kernels), drawing_from(self._generators):
            with self._device.autocast():
                loss = self._loss(self._model, inputs_BT, targets_BT)
            loss.backward()
        return loss.detach()


def _loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model.loss(inputs_BT, targets_BT)
