"""One training step after another."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from attnlm.base.signals import Interruption
from attnlm.compute.workers import compute_all, new_pool
from attnlm.config.settings import Config
from attnlm.data.batches import Batches
from attnlm.data.dataset import Dataset
from attnlm.training.share import Share, shares
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
    """One training step after another: everything that a step needs, held ready.

    Threads share a batch out: each computes the loss of some of its windows, and their gradients
    are averaged.
    """

    def __init__(self, state: TrainingState, config: Config, dataset: Dataset) -> None:
        self.state, self.config = state, config.training
        self.batches = training_batches(config, dataset)
        threads = config.training.threads or 1
        count = shares(threads, config) if state.device.name == "cpu" else 1
        self._threads = threads // count
        self._shares = [Share(state, config, count, first=i == 0) for i in range(count)]
        self._pool = new_pool(count)
        self._loss_sum = torch.full((), state.loss_sum, device=state.device.torch)
        self._sound_step = state.step

    def step(self, interruption: Interruption) -> Tensor:
        """Makes the next step and returns its loss, a tensor () still on the device."""
        state, shares = self.state, self._shares
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        inputs, targets = self.batches(state.step)
        parts = zip(np.split(inputs, len(shares)), np.split(targets, len(shares)), strict=True)
        jobs = [
            functools.partial(share, state.step, i, *part)
            for i, (share, part) in enumerate(zip(shares, parts, strict=True))
        ]
        losses = compute_all(jobs, self._pool)
        with interruption.shield():
            state.optimizer.average_gradients([share.gradient for share in shares[1:]])
            state.optimizer.step(state.step, self._pool, len(shares))
            loss = torch.stack(losses).mean()
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
