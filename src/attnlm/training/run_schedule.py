"""Decisions of the training loop: when to evaluate, and when the run ends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from attnlm.compute.processes import Processes
from attnlm.config.settings import Config
from attnlm.runs.journal import EARLY_STEPS
from attnlm.training.budget_clock import BudgetClock, expected_steps
from attnlm.training.eval_budget import is_whole_affordable
from attnlm.training.state import TrainingState
from attnlm.training.validation_loss import MOST_TOKENS

_SHARE_OF_BUDGET = 0.15
"""The largest fraction of a budget for evaluations."""
_CLOSING_FRACTION = 0.05
_CLOSING = 1.0
"""The most seconds of a budget for drawing and ending, and the fraction of a short budget."""


@dataclass
class RunSchedule:
    """Decides when a run evaluates and when it ends, by steps or by the clock of its budget."""

    config: Config
    state: TrainingState
    val_tokens: int
    clock: BudgetClock | None
    processes: Processes
    _evaluation_seconds: float = 0.0
    _validation_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._training = self.config.training
        self._next_evaluation = _next_tenth(self.state.progress)

    @property
    def is_over(self) -> bool:
        """Return True after the last step."""
        if self._training.budget is not None:
            return self.state.progress >= 1 and self.state.step > 0
        return self.state.step >= self._training.max_steps

    @property
    def is_out_of_patience(self) -> bool:
        """Return True if `patience` evaluations did not improve the loss."""
        return self._training.patience is not None and self.state.stale >= self._training.patience

    @property
    def should_stop(self) -> bool:
        """Return True if the run makes no more steps."""
        return self.is_over or self.is_out_of_patience

    @property
    def should_evaluate(self) -> bool:
        """Return True if an evaluation is due before the next step or the end."""
        step = self.state.step
        every = self._training.eval_every
        if step == self.state.evaluated_step:
            return False
        if every is None:
            return step == 0 or self.state.progress >= self._next_evaluation
        if step == 0:  # not if the only evaluation is the last step's
            return every < self._training.max_steps
        return step % every == 0 or self.is_over

    @property
    def should_snapshot(self) -> bool:
        """Return True if a snapshot without an evaluation is due, in runs that evaluate step 0."""
        every = self._training.eval_every
        step = self.state.step
        is_observed = every is None or every < self._training.max_steps
        return is_observed and step in EARLY_STEPS and step != self.state.evaluated_step

    def record_evaluation(self, seconds: float, validation_seconds: float) -> None:
        """Schedule the next evaluation. The newest one took `seconds`, its loss a part of them.

        Within a budget, evaluate at each tenth of the budget, or less often if that would take too
        much of it. All processes must call this.
        """
        self._evaluation_seconds = seconds
        self._validation_seconds = validation_seconds
        if self._training.budget is not None:
            pause = seconds / _SHARE_OF_BUDGET / self._training.budget
            following = _next_tenth(self.state.progress + max(0.0, pause - 0.1))
            self._next_evaluation = self.processes.broadcast_object(following)

    def stepped(self, seconds: float) -> None:
        """Set how much of a budget the time after the last step needs. A step took `seconds`.

        After the last step follow an evaluation, drawing the curve and, if affordable, the loss
        over the whole split by `measure_on_whole`. With half a step more, runs end on time on
        average.
        """
        if self.clock is None or self._training.budget is None:
            return
        closing = self._evaluation_seconds + seconds / 2
        closing += min(_CLOSING, _CLOSING_FRACTION * self._training.budget)
        tokens = self._training.eval_tokens
        whole = min(self.val_tokens - 1, MOST_TOKENS)
        if tokens is not None and tokens < whole:
            steps = expected_steps(self._training, self.state.step, self.state.progress)
            if is_whole_affordable(self.config, whole, int(steps), 1):
                closing += self._validation_seconds * whole / tokens
        self.clock.closing = closing

    def seconds_left(self, tokens_per_second: float) -> float:
        """Estimate the time until the end of the run."""
        if self.clock is not None:
            return max(0.0, self.clock.ends - time.perf_counter())
        steps = self._training.max_steps - self.state.step
        seconds = steps * self.config.tokens_per_step / tokens_per_second
        if self._training.eval_every is not None:
            seconds += math.ceil(steps / self._training.eval_every) * self._evaluation_seconds
        return seconds


def _next_tenth(progress: float) -> float:
    """Return the progress at the next evaluation: the next multiple of 0.1, at most 1."""
    return min(1.0, (math.floor(10 * progress + 1e-6) + 1) / 10)
