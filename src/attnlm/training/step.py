"""The training step: a batch divided among processes and threads, its loss, gradients, progress."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.caches import use_own_compiler_cache
from attnlm.base.signals import StopSignal
from attnlm.compute.device import keep_freed_memory
from attnlm.compute.processes import ALONE, Processes, noticing_lost
from attnlm.compute.threads import compute_all, new_pool
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.data.batches import Batches, window_seeds
from attnlm.data.dataset import Ids
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.layers import drawing_from
from attnlm.model.ops import Kernels, using
from attnlm.training.comparison import computes_gradients
from attnlm.training.kernels import kernels_of
from attnlm.training.one_layer import one_layer_form
from attnlm.training.optimizer import FlatOptimizer
from attnlm.training.schedule import Clock
from attnlm.training.state import TrainingState

_BEFORE_THE_CLOCK = 1e-9  # the progress assumed while it is still 0
_KINDS = ("loss", "gradient", "weights")
# The most shares of a micro-batch. One thread sums the gradients of all shares.
MOST_SHARES = 8


class BatchSplit(NamedTuple):
    """The division of a process's rows of a batch. `micro_batches` is the number of micro-batches,
    which are computed one after another. `shares` is the number of shares of each micro-batch, one
    per thread. `windows` is the number of windows in each share."""

    micro_batches: int
    shares: int
    windows: int


def split_batch(training: TrainingConfig, threads: int) -> BatchSplit:
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
    return BatchSplit(micro_batches, shares, at_once // shares)


class Replica:
    """The model of one thread. All threads use the same weights, but separate gradients."""

    def __init__(
        self, state: TrainingState, config: Config, kernels: Kernels, windows: int, *, first: bool
    ) -> None:
        training = config.training
        self._device, self._seed, self._windows = state.device, training.seed or 0, windows
        self._model, self.gradient = state.model, state.optimizer.gradient
        if not first:
            assert isinstance(state.optimizer, FlatOptimizer)
            self._model, self.gradient = state.optimizer.replica(state.model)
        self._kernels, self._form = kernels, None
        if not training.is_sharded and training.lora is None:
            self._form = one_layer_form(self._model, windows, state.device, self._kernels)
        self._loss, is_compiled = _loss, training.compile == "on"
        if is_compiled:
            use_own_compiler_cache()
            # PyTorch compiles the same function for a few models at most, and runs it uncompiled
            # for further models: discard the code of earlier training runs of this process.
            torch._dynamo.reset()
            self._loss = torch.compile(_loss, options=_compiler_options())
        self._draws = bool(config.spec.settings().get("dropout"))
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
        ids = [some.pin_memory() for some in ids] if on_cuda else ids
        inputs_BT, targets_BT = (i.to(self._device.torch, non_blocking=on_cuda) for i in ids)
        if self._form is not None:
            return self._form(inputs_BT, targets_BT)
        # The context includes the backward pass, which may compute a block again.
        with using(self._kernels), drawing_from(self._generators):
            with self._device.autocast():
                loss = self._loss(self._model, inputs_BT, targets_BT)
            loss.backward()
        return loss.detach()


def _compiler_options() -> dict[str, Any]:
    """Return options that keep the compiler from using a folder that another user may have made.

    PyTorch keeps precompiled headers in the system's temporary folder, not in the compiler's cache.
    """
    headers = "cpp_cache_precompile_headers"  # older versions of PyTorch have no such option
    return {headers: False} if headers in torch._inductor.list_options() else {}


def _usable_kernels(model: LanguageModel, training: TrainingConfig) -> Kernels:
    """Return the kernels that a configuration selects, without those that this model can't use.

    Blocks in C are compared with the modules, which may have been changed from outside.
    """
    kernels = kernels_of(training)

    def compute(trial: Transformer, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        with using(kernels):
            trial.loss(inputs_BT, targets_BT).backward()

    if kernels.matmul != "native" or not isinstance(model, Transformer):
        return kernels
    is_right = computes_gradients(model, compute)
    return kernels if is_right else dataclasses.replace(kernels, matmul="blas")


def _loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return model.loss(inputs_BT, targets_BT)


class TrainingData(Protocol):
    """The parts of a data set that training needs: ids and sizes."""

    @property
    def train(self) -> Ids: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def val_tokens(self) -> int: ...


class StepNotFiniteError(Exception):
    """Raised when numbers are NaN or infinite; the message says which numbers, at which step."""


class Stepper:
    """The training steps of a run.

    A batch is divided among processes, and each micro-batch of a process among threads. Each
    thread computes the loss of some windows; the gradients are averaged.
    """

    def __init__(
        self,
        state: TrainingState,
        config: Config,
        dataset: TrainingData,
        processes: Processes = ALONE,
        clock: Clock | None = None,
    ) -> None:
        training, length, threads = config.training, config.spec.block_size, 1
        self.state, self.config, self.processes, self.clock = state, training, processes, clock
        self.stop = StopSignal(alone=processes.count == 1)
        if state.device.name == "cpu":
            threads = training.threads or 1
            keep_freed_memory()
        self._cut = cut = split_batch(training, threads)
        self._rows = training.batch_size // training.processes
        self._first = processes.rank * self._rows
        assert training.seed is not None
        self.batches = Batches(
            dataset.train,
            block_size=length,
            batch_size=training.batch_size,
            stride=None if training.sampling == "random" else training.stride or length,
            seed=training.seed,
            vocab_size=dataset.vocab_size,
            rows=slice(self._first, self._first + self._rows),
        )
        self._threads = threads // cut.shares
        kernels = _usable_kernels(state.model, training)
        self._shares = [
            Replica(state, config, kernels, cut.windows, first=i == 0) for i in range(cut.shares)
        ]
        self._pool = new_pool(cut.shares, self._threads)
        self._loss_sum = torch.full((), state.loss_sum, device=state.device.torch)
        self._sound_step = state.step

    def step(self) -> Tensor:
        """Make the next step and return its loss, a tensor () on the device."""
        state, cut, optimizer = self.state, self._cut, self.state.optimizer
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        inputs, targets = self.batches(state.step)
        losses: list[Tensor] = []
        with noticing_lost():
            for first in range(0, self._rows, cut.shares * cut.windows):
                jobs = []
                for i, share in enumerate(self._shares):
                    begin = first + i * cut.windows
                    windows = (ids[begin : begin + cut.windows] for ids in (inputs, targets))
                    jobs.append(functools.partial(share, state.step, self._first + begin, *windows))
                losses += compute_all(jobs, self._pool)
        for share in self._shares[1:]:
            optimizer.gradient.add_(share.gradient)
            share.gradient.zero_()
        loss = torch.stack(losses).mean()
        if self.processes.count > 1:
            loss = self._add_up_processes(loss)
        elif state.device.name == "cpu" and not math.isfinite(loss):
            # On a GPU this check would wait for the step: `check_loss` checks at each report.
            wrong = ["loss", *optimizer.not_finite()]
            first = self._sound_step if len(wrong) > 1 else state.step
            raise StepNotFiniteError(_when(wrong, first + 1, state.step + 1))
        else:
            state.progress = self._progress()
        # FSDP has already averaged the gradients over processes.
        summed = 1 if self.config.is_sharded else self.processes.count
        if (parts := summed * cut.micro_batches * cut.shares) > 1:
            optimizer.gradient.mul_(1 / parts)
        with noticing_lost():
            about = self._pool, cut.shares, self.expected_steps(state.step + 1)
            optimizer.step(state.step, *about)
        self._loss_sum += loss
        state.step += 1
        self.stop.raises = False  # a step was made that can be saved
        return loss

    def expected_steps(self, made: int) -> float | None:
        """Estimate the steps of the whole run after `made` steps; return None without a budget."""
        if self.config.budget is None:
            return None
        return max(made, 1) / max(self.state.progress, _BEFORE_THE_CLOCK)

    def _progress(self) -> float:
        """Return the progress after this step: by the clock or by steps, whichever is larger."""
        state, steps = self.state, self.config.steps
        if self.clock is None:
            return state.progress
        by_steps = 0.0 if steps is None else (state.step + 1) / steps
        return max(self.clock.advance(state.progress), by_steps)

    def _add_up_processes(self, loss: Tensor) -> Tensor:
        """Sum the gradients of all processes; return the mean of their losses.

        The same all-reduce tells all processes whether the loss is finite, whether a signal has
        come, and what the progress of rank 0 is. Raises StepNotFiniteError, and
        LostProcessError if a process has ended.
        """
        progress = self._progress() if self.processes.is_main else 0.0
        numbers = loss, self.stop.has_come, progress
        rest = self.state.optimizer.all_reduce(self.processes, numbers)
        # NCCL's wait has a timeout, so it has already waited for the GPU: reading costs no more.
        total, stopping, self.state.progress = rest.tolist()
        if not math.isfinite(total):
            raise StepNotFiniteError(_when(["loss"], self._sound_step + 1, self.state.step + 1))
        self._sound_step = self.state.step
        if stopping:
            self.stop.agree()
        return rest[0] / self.processes.count

    def check_loss(self) -> None:
        """Raise StepNotFiniteError unless all losses since the newest evaluation are finite."""
        if not math.isfinite(self._loss_sum.item()):
            raise StepNotFiniteError(_when(["loss"], self._sound_step + 1, self.state.step))

    def read_loss_sum(self) -> float:
        """Return the sum of losses since the newest evaluation.

        Raises StepNotFiniteError unless the sum, the weights and the optimizer's state are finite.
        All processes that hold a sharded model have to call this.
        """
        total = self._loss_sum.item()
        wrong = [] if math.isfinite(total) else ["loss"]
        wrong += self.state.optimizer.not_finite()
        if self.config.is_sharded:
            found = torch.tensor([float(kind in wrong) for kind in _KINDS])
            self.processes.all_reduce(found)
            wrong = [kind for kind, count in zip(_KINDS, found, strict=True) if count]
        if wrong:
            raise StepNotFiniteError(_when(wrong, self._sound_step + 1, self.state.step))
        self._sound_step = self.state.step
        return total

    def reset_loss_sum(self) -> None:
        """Set the sum of losses to 0 after an evaluation."""
        self._loss_sum.zero_()


def _when(wrong: list[str], first: int, last: int) -> str:
    """Return what is wrong and when it happened, for a message."""
    when = f"at step {last}" if first >= last else f"between steps {first} and {last}"
    names = " and ".join(filter(None, [", ".join(wrong[:-1]), wrong[-1]]))
    are = "is no longer a finite number" if len(wrong) == 1 else "are no longer finite numbers"
    return f"{names} {are} ({when})"
