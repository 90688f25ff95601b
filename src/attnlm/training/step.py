"""The training step: a batch divided among processes and replicas, its loss and its gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.signals import StopSignal
from attnlm.compute.device import keep_freed_memory
from attnlm.compute.processes import ALONE, Processes
from attnlm.compute.threads import compute_all, new_pool
from attnlm.config.settings import Config
from attnlm.data.batches import Batches
from attnlm.data.dataset import Dataset
from attnlm.data.examples import limit_per_window
from attnlm.training.batch_split import split_batch
from attnlm.training.budget_clock import BudgetClock, expected_steps
from attnlm.training.forms import choose_form
from attnlm.training.own_code_trial import TRIED_WINDOWS, Trial, try_own_code
from attnlm.training.random_state import StepDraws
from attnlm.training.state import TrainingState


def _counted_share(targets: NDArray[np.int64]) -> float:
    """Return the fraction of the targets that are not ignored."""
    return float(np.count_nonzero(targets >= 0)) / targets.size


def new_batches(config: Config, dataset: Dataset, rows: slice) -> Batches:
    """Return these rows of the training batches of a run."""
    training = config.training.complete()
    block_size = config.spec.block_size
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


class StepNotFiniteError(Exception):
    """Raised when numbers became NaN or infinite between the steps `first` and `last`."""

    def __init__(self, first: int, last: int) -> None:
        when = f"at step {last}" if first >= last else f"between steps {first} and {last}"
        super().__init__(f"loss, gradient or weights are no longer finite numbers ({when})")


class StepSums(NamedTuple):
    """The numbers of a step of all processes."""

    loss: Tensor
    """the mean loss of all targets, (), where an ignored target has a loss of 0"""
    counted: float
    """the fraction of the targets that are not ignored"""
    progress: float
    """the progress of the run after the step, by the clock of rank 0"""
    is_finite: bool
    """False if the loss is NaN or infinite, and known to be so"""
    is_stopping: bool
    """True if a process has received a signal to stop"""


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
        clock: BudgetClock | None = None,
    ) -> None:
        training = config.training.complete()
        threads = 1
        if state.device.name == "cpu":
            threads = training.threads
            keep_freed_memory()
        self.state = state
        self.training = training
        self.processes = processes
        self.clock = clock
        self.stop = StopSignal(alone=processes.count == 1)
        self.has_stepped = False
        """True once this object has made a step, which a signal must not lose."""
        self.has_counted = state.loss_sum != 0
        """True if a step since the newest evaluation had a target that is not ignored"""
        self._config = config
        self._all_threads = threads
        rows = training.batch_size // training.processes
        self._rows = slice(processes.rank * rows, (processes.rank + 1) * rows)
        self.batches = new_batches(config, dataset, self._rows)
        trial = Trial(may_replicate=True)
        if config.codes:
            first = new_batches(config, dataset, TRIED_WINDOWS)(0)
            trial = try_own_code(config, state.model, state.device, *first)
        self._why_whole = trial.why_whole
        self._most_replicas = threads if trial.may_replicate and not self._why_whole else 1
        is_divided = split_batch(training, threads).windows < training.batch_size
        self.kept_whole_because = self._why_whole if is_divided else ""
        """why own code needs the batch whole, if it would be divided otherwise"""
        self._divide_batch()
        self._ignores_targets = dataset.train_examples is not None
        self._loss_sum = torch.full((), state.loss_sum, device=state.device.torch)
        self._finite_step = state.step

    def _divide_batch(self) -> None:
        """Divide the batch among micro-batches and replicas, and make the replicas."""
        training = self.training
        if self._why_whole:
            training = dataclasses.replace(training, micro_batch_size=None)
        self._split = split_batch(training, self._most_replicas)
        self._threads = self._all_threads // self._split.replicas
        self._pool = new_pool(self._split.replicas, self._threads)
        optimizer = self.state.optimizer
        others = [optimizer.replica(self.state.model) for _ in range(1, self._split.replicas)]
        windows = self._split.windows
        self._replicas = []
        self._other_gradients = [gradient for _, gradient in others]
        for model in (self.state.model, *(copied for copied, _ in others)):
            draws = StepDraws(self._config, self.state.device, windows)
            form = choose_form(model, self._config, self.state.device, windows, draws.generators)
            self._replicas.append((form, draws))
        per_process = self._split.micro_batches * self._split.replicas
        self._gradient_count = self.processes.count * per_process

    def step(self) -> Tensor:
        """Make the next step and return its loss, a tensor () on the device.

        If a GPU's memory runs out in the first step, the micro-batch is halved until the step fits,
        and `training` says so. Raises AttnlmError if one window does not fit, StepNotFiniteError,
        and LostProcessError if a process has ended.
        """
        state = self.state
        gradient = state.optimizer.gradient
        inputs, targets = self.batches(state.step)
        losses: list[Tensor] = []
        while not losses:
            gradient.zero_()
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            windows = self._split.windows
            try:
                for first in range(0, len(inputs), windows * self._split.replicas):
                    begins = range(first, len(inputs), windows)
                    jobs = [
                        self._job(replica, begin, inputs, targets)
                        for replica, begin in enumerate(begins[: self._split.replicas])
                    ]
                    losses += compute_all(jobs, self._pool)
            except torch.OutOfMemoryError:
                if self.has_stepped:
                    raise
                losses = []
            if not self.has_stepped:
                failures = torch.full_like(self._loss_sum, not losses)
                self.processes.all_reduce(failures)
                if failures:  # the step does not fit into the memory of each process
                    losses = []
                    self._halve_micro_batch()
        for other in self._other_gradients:
            gradient.add_(other)
            other.zero_()
        counted = _counted_share(targets) if self._ignores_targets else 1.0
        sums = self._sum_over_processes(torch.stack(losses).mean(), counted)
        self._check(sums.is_finite, state.step + 1)
        if sums.is_stopping:
            self.stop.agree_to_stop()
        loss = self._add_loss(self._update(sums), sums.counted > 0)
        state.step += 1
        state.progress = sums.progress
        self.has_stepped = True
        self.stop.defer()  # from now on, there is something to save
        return loss

    def _job(
        self, replica: int, begin: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> Callable[[], Tensor]:
        """Return the computation of a replica: the mean loss, (), of its windows from row `begin`
        of this process's inputs and targets on, and their gradient."""
        form, draws = self._replicas[replica]
        rows = slice(begin, begin + self._split.windows)
        if not (targets[rows] >= 0).any():  # a mean of none would be 0 / 0
            return lambda: torch.zeros((), device=self.state.device.torch)
        draws.seed(self.state.step, self._rows.start + begin)
        batch = self._on_device(inputs[rows]), self._on_device(targets[rows])
        return functools.partial(form, *batch)

    def _on_device(self, ids: NDArray[np.int64]) -> Tensor:
        device = self.state.device
        if device.name != "cuda":
            return torch.from_numpy(ids).to(device.torch)
        # CUDA copies pinned memory asynchronously. Other GPUs might then read memory that is
        # already reused.
        return torch.from_numpy(ids).pin_memory().to(device.torch, non_blocking=True)

    def _halve_micro_batch(self) -> None:
        """Compute half as many windows at once. Raises AttnlmError if there is only one."""
        windows = self._split.windows * self._split.replicas
        if self._why_whole and windows > 1:
            raise AttnlmError(
                f"the batch does not fit into the memory of the GPU, and {self._why_whole}",
                f"lower `batch_size` {windows}",
            )
        if windows == 1:
            raise AttnlmError(
                f"one window of `block_size` {self._config.spec.block_size} does not fit into the "
                "memory of the GPU",
                "lower `block_size`, or use a smaller model",
            )
        if self.state.device.name == "cuda":
            torch.cuda.empty_cache()
        self.training = dataclasses.replace(self.training, micro_batch_size=windows // 2)
        self._divide_batch()

    def _update(self, sums: StepSums) -> Tensor:
        """Update the weights by the summed gradients; return the loss per counted target, ()."""
        # Ignored targets have counted with a loss of 0: divide by the fraction of the others.
        # Without any, the gradient is 0 anyway.
        counted = sums.counted or 1.0
        scale = 1 / (self._gradient_count * counted)
        if scale != 1:
            self.state.optimizer.gradient.mul_(scale)
        made = self.state.step
        self.state.optimizer.update(
            made,
            total_steps=expected_steps(self.training, made + 1, sums.progress),
            pool=self._pool,
            threads=self._split.replicas,
        )
        return sums.loss if counted == 1 else sums.loss / counted

    def _add_loss(self, loss: Tensor, is_counted: bool) -> Tensor:
        """Add the loss of a step to the sum, and return it.

        For a step without a counted target, it is the mean of the losses of other steps since the
        newest evaluation; 0 before the first of them, which then counts for these steps too.
        """
        before = self.state.step - max(0, self.state.evaluated_step)
        if is_counted:
            self._loss_sum += loss if self.has_counted else loss * (before + 1)
            self.has_counted = True
        elif self.has_counted:
            loss = self._loss_sum / before
            self._loss_sum += loss
        return loss

    def _sum_over_processes(self, loss: Tensor, counted: float) -> StepSums:
        """Sum the gradients of all processes, and combine the other numbers of the step.

        One all-reduce sums both. Raises LostProcessError if a process has ended.
        """
        progress = self.state.progress if self.processes.is_main else 0.0
        if self.processes.is_main and self.clock is not None:
            by_steps = (self.state.step + 1) / self.training.max_steps  # 0 for a budget alone
            progress = max(self.clock.advance(progress), by_steps)
        count = self.processes.count
        if count == 1:
            # Reading the loss would wait for a GPU: `check_loss` checks it at each report.
            is_finite = self.state.device.name != "cpu" or math.isfinite(loss)
            return StepSums(loss, counted, progress, is_finite, is_stopping=False)
        numbers = (loss, counted, progress, self.stop.has_come)
        sums = self.state.optimizer.all_reduce(self.processes, numbers)
        # NCCL's wait has a timeout, so it has already waited for the GPU: reading costs no more.
        total, counted, progress, stopping = sums.tolist()
        is_finite = math.isfinite(total)
        return StepSums(sums[0] / count, counted / count, progress, is_finite, stopping > 0)

    def _check(self, is_finite: bool, step: int) -> None:
        """Raise StepNotFiniteError unless the numbers are still finite at this step."""
        if not is_finite:
            raise StepNotFiniteError(self._finite_step + 1, step)

    def check_loss(self) -> None:
        """Raise StepNotFiniteError unless all losses since the newest evaluation are finite."""
        self._check(math.isfinite(self._loss_sum.item()), self.state.step)

    def read_loss_sum(self) -> float:
        """Return the sum of losses since the newest evaluation.

        Raises StepNotFiniteError unless the sum, the weights and the optimizer's state are finite.
        """
        total = self._loss_sum.item()
        is_finite = math.isfinite(total) and self.state.optimizer.is_finite()
        self._check(is_finite, self.state.step)
        self._finite_step = self.state.step
        return total

    def reset_loss_sum(self) -> None:
        """Set the sum of losses to 0 after an evaluation."""
        self._loss_sum.zero_()
        self.has_counted = False
