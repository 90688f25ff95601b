"""The training step: a batch divided among processes and replicas, its loss and its gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.process import StopSignal
from attnlm.compute.device import Device, keep_freed_memory
from attnlm.compute.processes import ALONE, Processes
from attnlm.compute.threads import computing, new_pool
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.data.batches import Batches, window_seeds
from attnlm.data.dataset import Dataset
from attnlm.data.examples import limit_per_window
from attnlm.model.language_model import LanguageModel
from attnlm.training.forms import Form, choose_form
from attnlm.training.own_code_trial import TRIED_WINDOWS, Trial, try_own_code
from attnlm.training.random_state import seed_generators
from attnlm.training.schedule import Schedule
from attnlm.training.state import TrainingState

Array = NDArray[np.int64]
MOST_REPLICAS = 8
"""The most replicas of a model in a process. One thread sums the gradients of all replicas."""


class BatchSplit(NamedTuple):
    """The division of a micro-batch. A process computes its micro-batches one after another."""

    replicas: int
    """the number of replicas of the model, each in a thread"""
    windows: int
    """the number of windows that a replica computes at once"""


def split_batch(training: TrainingConfig, threads: int) -> BatchSplit:
    """Divide a batch into as few micro-batches as `micro_batch_size` allows, and among replicas.

    If there are fewer replicas than threads, PyTorch uses several threads for each replica.
    """
    rows = training.batch_size // training.processes
    most = training.micro_batch_size or rows
    at_once = next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)
    possible = range(min(threads, at_once, MOST_REPLICAS), 0, -1)
    replicas = next(n for n in possible if threads % n == 0 and at_once % n == 0)
    if training.compile == "torch":
        replicas = 1
    return BatchSplit(replicas, at_once // replicas)


def new_batches(config: Config, dataset: Dataset, rows: slice) -> Batches:
    """Return these rows of the training batches of a run that has chosen its seed."""
    training, block_size = config.training, config.spec.block_size
    assert training.seed is not None
    return Batches(
        dataset.train,
        block_size=block_size,
        batch_size=training.batch_size,
        stride=None if training.sampling == "random" else training.stride or block_size,
        seed=training.seed,
        vocab_size=dataset.vocab_size,
        rows=rows,
        examples=limit_per_window(dataset.train_examples, training.examples_per_window),
        only_answers=training.loss_on == "answers",
    )


def try_divisions(config: Config, model: LanguageModel, device: Device, dataset: Dataset) -> Trial:
    """Return the divisions of a batch that a run allows.

    Nothing is known of a loss of the user's own, which gets whole batches without a trial.
    """
    if (loss := config.training.loss) is not None:
        return Trial(may_replicate=False, why_whole=f"the loss {loss} gets the whole batch")
    if not config.codes:
        return Trial(may_replicate=True)
    inputs, _ = new_batches(config, dataset, TRIED_WINDOWS)(0)
    return try_own_code(model, device, inputs)


class StepNotFiniteError(AttnlmError):
    """Raised when numbers became NaN or infinite between the steps `first` and `last`."""

    def __init__(
        self, first: int, last: int, training: TrainingConfig, saved_step: int | None = None
    ) -> None:
        when = f"at step {last}" if first >= last else f"between steps {first} and {last}"
        clip = "" if training.gradient_clip else " or add `gradient_clip` 1"
        saved = "" if saved_step is None else f"; the last checkpoint has step {saved_step}"
        super().__init__(
            f"the loss, gradient or weights are no longer finite numbers ({when})",
            f"lower `learning_rate` {training.learning_rate:g}{clip}{saved}",
        )


class Stepper:
    """The training steps of a run.

    A batch is divided among processes, and each micro-batch of a process among replicas. Each
    replica computes the loss of some windows in its own thread; the gradients are averaged.
    """

    def __init__(
        self,
        state: TrainingState,
        config: Config,
        dataset: Dataset,
        processes: Processes = ALONE,
        ends: float | None = None,
    ) -> None:
        """A run with a budget ends when `time.perf_counter` reaches `ends`."""
        training = config.training
        self.schedule = Schedule(config, state, dataset.val_tokens, ends, processes)
        self._threads = 1
        if state.device.name == "cpu":
            self._threads = training.threads or 1
            keep_freed_memory()
        self.state = state
        self.config = config
        """Another one if memory ran out in the first step: with a smaller `micro_batch_size`."""
        self.processes = processes
        self.stop = StopSignal(alone=processes.count == 1)
        self.has_stepped = False
        """True once this object has made a step, which a signal must not lose."""
        rows = training.batch_size // training.processes
        self._first_row = processes.rank * rows
        self.batches = new_batches(config, dataset, slice(self._first_row, self._first_row + rows))
        self._seed = self.batches.seed
        trial = try_divisions(config, state.model, state.device, dataset)
        self._why_whole = trial.why_whole
        self._most_replicas = self._threads if trial.may_replicate and not self._why_whole else 1
        self._divide_batch()
        self._loss_sum = torch.full((), state.loss_sum, device=state.device.torch)
        self._finite_step = state.step

    def _divide_batch(self) -> None:
        """Divide the batch among micro-batches and replicas, and make the replicas."""
        config, device = self.config, self.state.device
        training = config.training
        if self._why_whole:
            training = replace(training, micro_batch_size=None)
        self._split = split_batch(training, self._most_replicas)
        self._torch_threads = self._threads // self._split.replicas
        self._pool = new_pool(self._split.replicas, self._torch_threads)
        optimizer, model = self.state.optimizer, self.state.model
        others = [optimizer.replica(model) for _ in range(1, self._split.replicas)]
        self._other_gradients = [gradient for _, gradient in others]
        # Own code, a GPU and compiled code draw from PyTorch's own generator, and dropout on a CPU
        # from one for each window.
        has_dropout = bool(config.spec.settings().get("dropout"))
        is_torch_drawing = device.name != "cpu" or training.compile == "torch"
        self._seeds_torch = bool(config.codes) or (has_dropout and is_torch_drawing)
        windows = self._split.windows
        drawing = windows if has_dropout and not is_torch_drawing else 0
        self._replicas: list[tuple[Form, list[torch.Generator]]] = []
        for replica in (model, *(copied for copied, _ in others)):
            generators = [torch.Generator() for _ in range(drawing)]
            form = choose_form(replica, config, device, windows, generators)
            self._replicas.append((form, generators))

    def step(self) -> Tensor:
        """Make the next step and return its loss, a tensor () on the device.

        Raises AttnlmError if one window does not fit into a GPU's memory, StepNotFiniteError, and
        LostProcessError if a process has ended.
        """
        inputs, targets = self.batches(self.state.step)
        compute = self._losses if self.has_stepped else self._losses_that_fit
        loss = torch.stack(compute(inputs, targets)).mean()
        return self._update(loss, np.count_nonzero(targets >= 0) / targets.size)

    def _losses(self, inputs: Array, targets: Array) -> list[Tensor]:
        """Set the gradient to that of this process's inputs and targets; return the mean loss, (),
        of each part of them."""
        gradient = self.state.optimizer.gradient.zero_()
        if torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)
        replicas, windows = self._split
        losses: list[Tensor] = []
        for first in range(0, len(inputs), windows * replicas):
            jobs = [
                self._job(replica, first + replica * windows, inputs, targets)
                for replica in range(replicas)
            ]
            with computing(jobs[1:], self._pool) as others:
                losses += [jobs[0](), *others()]
        for other in self._other_gradients:
            gradient.add_(other)
            other.zero_()
        return losses

    def _losses_that_fit(self, inputs: Array, targets: Array) -> list[Tensor]:
        """Do as `_losses`, and halve the micro-batch until it fits into each process's memory."""
        while True:
            losses: list[Tensor] = []
            with contextlib.suppress(torch.OutOfMemoryError):
                losses = self._losses(inputs, targets)
            failures = torch.full_like(self._loss_sum, not losses)
            self.processes.all_reduce(failures)
            if not failures:
                return losses
            self._halve_micro_batch()

    def _job(self, replica: int, begin: int, inputs: Array, targets: Array) -> Callable[[], Tensor]:
        """Return the computation of a replica: the mean loss, (), of its windows from row `begin`
        of this process's inputs and targets on, and their gradient."""
        form, generators = self._replicas[replica]
        windows = self._split.windows
        rows = slice(begin, begin + windows)
        if not (targets[rows] >= 0).any():  # a mean of none would be 0 / 0
            return lambda: torch.zeros((), device=self.state.device.torch)
        if self._seeds_torch or generators:
            seeds = window_seeds(self._seed, self.state.step, self._first_row + begin, windows)
            if self._seeds_torch:
                seed_generators(seeds[0])
            for generator, seed in zip(generators, seeds, strict=False):
                generator.manual_seed(seed)
        batch = self._on_device(inputs[rows]), self._on_device(targets[rows])
        return functools.partial(form, *batch)

    def _on_device(self, ids: Array) -> Tensor:
        device = self.state.device
        if device.name != "cuda":
            return torch.from_numpy(ids).to(device.torch)
        # CUDA copies pinned memory asynchronously. Other GPUs might then read memory that is
        # already reused.
        return torch.from_numpy(ids).pin_memory().to(device.torch, non_blocking=True)

    def _halve_micro_batch(self) -> None:
        """Compute half as many windows at once. Raises AttnlmError if there is only one."""
        windows = self._split.windows * self._split.replicas
        if windows == 1:
            raise AttnlmError(
                f"one window of `block_size` {self.config.spec.block_size} does not fit into the "
                "memory of the GPU",
                "lower `block_size`, or use a smaller model",
            )
        if self._why_whole:
            raise AttnlmError(
                f"the batch does not fit into the memory of the GPU, and {self._why_whole}",
                f"lower `batch_size` {windows}",
            )
        if self.state.device.name == "cuda":
            torch.cuda.empty_cache()
        self.config = self.config.with_training(micro_batch_size=windows // 2)
        self._divide_batch()

    def _update(self, loss: Tensor, counted: float) -> Tensor:
        """Update the weights by the gradients, summed over processes; return the step's loss, ().

        `loss`, the mean of this process's targets, has a loss of 0 for those that are ignored;
        `counted` is the fraction of the others.
        """
        state, count = self.state, self.processes.count
        progress = self.schedule.progress_after_step()
        if count > 1:  # one all-reduce sums gradients and numbers
            numbers = (loss, counted, progress * self.processes.is_main, self.stop.has_come)
            sums = state.optimizer.all_reduce(self.processes, numbers)
            # NCCL's wait has a timeout, so it has waited for the GPU: reading costs no more.
            _, counted, progress, stopping = sums.tolist()
            loss, counted = sums[0] / count, counted / count
            if stopping:
                self.stop.agree_to_stop()
        # Reading the loss would wait for a single GPU: `check_loss` checks it at each report.
        if count > 1 or state.device.name == "cpu":
            self._check(math.isfinite(loss), state.step + 1)
        loss = self._add_loss(loss / (counted or 1.0), counted > 0)
        # The mean over counted targets. Without any, the gradient is 0 anyway.
        gradients = self.config.training.batch_size // self._split.windows
        scale = 1 / (gradients * (counted or 1.0))
        if scale != 1:
            state.optimizer.gradient.mul_(scale)
        made = state.step
        state.step, state.progress = made + 1, progress
        rate = self.schedule.learning_rate
        state.optimizer.update(made, rate, self._pool if self._other_gradients else None)
        self.has_stepped = True
        self.stop.defer()  # from now on, there is something to save
        return loss

    def _add_loss(self, loss: Tensor, is_counted: bool) -> Tensor:
        """Add the loss of a step to the sum, and return it.

        A step without a counted target has the mean of the losses so far; 0 before the first.
        """
        if not is_counted:
            return self._loss_sum / max(1, self.state.counted_steps)
        self._loss_sum += loss
        self.state.counted_steps += 1
        return loss

    def check(self) -> None:
        """Raise StepNotFiniteError unless losses, weights and the optimizer's state are finite.

        Write the sum of losses since the newest evaluation to the state.
        """
        self.check_loss()
        self._check(self.state.optimizer.is_finite(), self.state.step)
        self.state.loss_sum = self._loss_sum.item()
        self._finite_step = self.state.step

    def check_loss(self) -> None:
        """Raise StepNotFiniteError unless all losses since the newest evaluation are finite."""
        self._check(math.isfinite(self._loss_sum.item()), self.state.step)

    def _check(self, is_finite: bool, step: int) -> None:
        if not is_finite:
            saved = self.state.saved_step
            raise StepNotFiniteError(self._finite_step + 1, step, self.config.training, saved)

    def reset_loss_sum(self) -> None:
        """Set the sum of losses to 0 after an evaluation."""
        self._loss_sum.zero_()
