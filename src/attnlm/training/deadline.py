"""A run that is to end at a given time: planned by its pace, and planned again as that changes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from attnlm.config.settings import with_steps
from attnlm.config.stages import Stage, parsed_stages, written
from attnlm.config.training import TrainingConfig

# Of the budget: what evaluations may take, and after how much of it the clock is looked at.
_EVALUATION_SHARE, _BETWEEN_LOOKS = 0.15, 1 / 40
_MOST_EVALUATIONS = 10
# A plan is kept while it differs by less than this from what fits.
_NOTICEABLE = 0.05
# The learning rate falls in at least so many steps, though time is up.
_FEWEST_LEFT = 3
# What comes after the last step, in seconds and as a share of the budget: the smaller one.
_CLOSING, _CLOSING_SHARE = 1.0, 0.05


@dataclass(frozen=True)
class Pace:
    """Seconds that a training step and an evaluation take, of one run or of several together."""

    step: float
    evaluation: float

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.step + other.step, self.evaluation + other.evaluation)


@dataclass
class Deadline:
    """When a run is to be over, measured by `time.perf_counter`, and its pace of late."""

    ends: float
    budget: float
    """seconds, for shares of it"""
    pace: Pace
    eval_every: int | None = None
    """where it was asked for; else it follows the number of steps"""
    closing_evaluations: float = 0.0
    """how many evaluations' time it takes to measure the whole split in the end"""
    most_steps: int | None = None
    _since: float = field(default=0.0, init=False)
    _since_step: int = field(default=0, init=False)

    def planned(self, training: TrainingConfig) -> TrainingConfig:
        """As many steps as there is time for, and a warm-up that leaves most of them."""
        steps, eval_every = self._fitting(0)
        warmup = min(training.warmup, steps // 4)
        training = replace(training, eval_every=eval_every, warmup=warmup)
        return with_steps(training, max(1, steps))

    def begin(self, step: int) -> None:
        """Time is measured from this step on."""
        self._since, self._since_step = time.perf_counter(), step

    def evaluated(self, seconds: float) -> None:
        """Takes note of an evaluation, whose time no step has taken."""
        self.pace = Pace(self.pace.step, (self.pace.evaluation + seconds) / 2)
        self._since += seconds

    def is_look_due(self) -> bool:
        """Whether the pace is to be looked at."""
        return time.perf_counter() - self._since >= _BETWEEN_LOOKS * self.budget

    def planned_again(self, training: TrainingConfig, step: int) -> TrainingConfig | None:
        """Another number of steps for the rest of the time; None where the plan still fits.

        At least one step has been made since the last call.
        """
        now = time.perf_counter()
        measured = (now - self._since) / (step - self._since_step)
        self.pace = Pace((self.pace.step + measured) / 2, self.pace.evaluation)
        self._since, self._since_step = now, step
        assert training.steps is not None
        left = training.steps - step
        steps, eval_every = self._fitting(step)
        steps = max(steps, step + min(left, _FEWEST_LEFT))
        if left == 0 or abs(steps - training.steps) <= _NOTICEABLE * left:
            return None
        before = training.stages or written((Stage(0, training.steps),))
        stages = written((*parsed_stages(before), Stage(step, steps)))
        if training.eval_every is not None and _are_close(eval_every, training.eval_every):
            eval_every = training.eval_every
        return replace(training, steps=steps, eval_every=eval_every, stages=stages)

    def _fitting(self, made: int) -> tuple[int, int]:
        """How many steps there is time for, in all, and every how many one evaluates."""
        evaluation = self.pace.evaluation
        seconds = self.ends - time.perf_counter() - self.closing_evaluations * evaluation
        seconds -= min(_CLOSING, _CLOSING_SHARE * self.budget)
        if self.eval_every is not None:
            left = (seconds - evaluation) / (self.pace.step + evaluation / self.eval_every)
            return self._bounded(made + int(left)), self.eval_every
        affordable = int(_EVALUATION_SHARE * self.budget / evaluation)
        wanted = min(_MOST_EVALUATIONS, max(1, affordable))
        to_come = 1 + round(wanted * max(0.0, seconds) / self.budget)
        steps = self._bounded(made + int((seconds - to_come * evaluation) / self.pace.step))
        return steps, max(1, math.ceil(steps / wanted))

    def _bounded(self, steps: int) -> int:
        return max(0, steps if self.most_steps is None else min(steps, self.most_steps))


def _are_close(one: int, other: int) -> bool:
    """Whether evaluations need not be moved."""
    return 3 * max(one, other) <= 4 * min(one, other)
