"""From seconds to steps: the pace of a training, measured, and what fits into a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.base.readable import duration
from attnlm.compute.device import Device
from attnlm.config.settings import Config, with_steps
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset
from attnlm.training.deadline import Deadline, Pace
from attnlm.training.price import (
    CHEAP,
    affordable_tokens,
    evaluation_price,
    is_whole_affordable,
    step_price,
)
from attnlm.training.state import initial_state, keeping_random_state
from attnlm.training.step import Stepper
from attnlm.training.validation import MOST_TOKENS

# Of the budget: what the trial of speed may take, and one evaluation of the whole split.
TRIAL_SHARE, _WHOLE_SHARE = 0.03, 0.04
# The first step is slower than others, by less than three times: where it takes this share of the
# time that is left, too few steps fit.
_LONGEST_FIRST_STEP = 0.3
# By how much windows may be faster together than each alone.
_MOST_GAINED = 8
# Fewer steps teach a model nothing.
_FEWEST_STEPS = 10
# A process may have taken the whole of a very short budget to begin.
_AT_LEAST = 2.0


@dataclass(frozen=True)
class Budget:
    """`seconds` for a command or call that began at `began`, by `time.perf_counter`."""

    seconds: float
    began: float
    most_steps: int | None = None
    """More would be of no use."""

    @property
    def ends(self) -> float:
        """When it is over; in a moment, if it is over already."""
        left_at_least = min(_AT_LEAST, self.seconds)
        return max(self.began + self.seconds, time.perf_counter() + left_at_least)


@dataclass(frozen=True)
class Planned:
    """Runs that are to end in time, trained one after another: what they share, and each pace."""

    training: TrainingConfig
    deadline: Deadline
    paces: Sequence[Pace]


def planned(
    configs: Sequence[Config], dataset: Dataset, device: Device, budget: Budget, on_event: OnEvent
) -> Planned:
    """As many steps, of each of these configurations, as the budget has time for.

    Their speed is measured by a trial whose weights are thrown away. Raises AttnlmError where the
    steps are too few to be of use.
    """
    on_event(Note("measuring how long a step takes"))
    ends, share = budget.ends, TRIAL_SHARE / len(configs)
    steps = [seconds_per_step(config, dataset, device, budget, share) for config in configs]
    together, left = sum(steps), ends - time.perf_counter()
    evaluated = _part_for(configs, dataset, steps, budget, int(left / together))
    paces = [
        Pace(step, step * evaluation_price(config, dataset.vocab_size, dataset.val_tokens))
        for config, step in zip(evaluated, steps, strict=True)
    ]
    pace = sum(paces[1:], paces[0])
    training = evaluated[0].training
    deadline = Deadline(
        ends, budget.seconds, pace, configs[0].training.eval_every, most_steps=budget.most_steps
    )
    deadline.closing_evaluations = _closing_evaluations(evaluated[0], dataset, left / together)
    training = deadline.planned(training)
    assert training.steps is not None
    each = " of every model" if len(configs) > 1 else ""
    one = "one step of every model together" if len(configs) > 1 else "a step"
    takes = f"{one} takes {duration(pace.step, 2)}"
    if training.steps < _FEWEST_STEPS:
        raise _too_short(budget, takes, pace)
    fit = f"about {training.steps:,} steps{each} fit into {duration(budget.seconds)}"
    if training.steps == budget.most_steps:
        fit = f"{training.steps:,} steps, since more would not help"
    on_event(Note(f"{fit}: {takes}, an evaluation about {duration(pace.evaluation, 2)}"))
    if training.warmup < configs[0].training.warmup:
        on_event(Note(f"warm-up shortened to {training.warmup:,} steps"))
    return Planned(training, deadline, paces)


def seconds_per_step(
    config: Config, dataset: Dataset, device: Device, budget: Budget, share: float
) -> float:
    """Measured over one step and then as many more as take that share of the budget.

    Raises AttnlmError where a step takes too much of it.
    """
    trial = replace(config, training=with_steps(config.training, 2**30))
    with keeping_random_state(device):
        left = budget.ends - time.perf_counter()
        _check_step(_seconds_at_least(trial, dataset, device), left, budget)
        stepper = Stepper(initial_state(trial, dataset.vocab_size, device), trial, dataset)
        first = _seconds_of_step(stepper)
        _check_step(first, left, budget)
        began = time.perf_counter()
        while True:
            _seconds_of_step(stepper)
            seconds = time.perf_counter() - began
            if seconds + first >= share * budget.seconds:
                return seconds / (stepper.state.step - 1)


def _seconds_at_least(trial: Config, dataset: Dataset, device: Device) -> float:
    """What a step takes at the very least, by one of its windows: so that none is made for hours.

    0 where it would have to be compiled for one window alone.
    """
    if trial.training.compile == "on":
        return 0.0
    alone = replace(trial, training=replace(trial.training, batch_size=1))
    stepper = Stepper(initial_state(alone, dataset.vocab_size, device), alone, dataset)
    _seconds_of_step(stepper)  # slower than others
    return _seconds_of_step(stepper) * trial.training.batch_size / _MOST_GAINED


def _seconds_of_step(stepper: Stepper) -> float:
    began = time.perf_counter()
    stepper.step().item()
    return time.perf_counter() - began


def _check_step(seconds: float, left: float, budget: Budget) -> None:
    if seconds > _LONGEST_FIRST_STEP * left:
        raise _too_short(budget, f"a step takes {duration(seconds, 2)} or more", Pace(seconds, 0.0))


def _part_for(
    configs: Sequence[Config],
    dataset: Dataset,
    steps: Sequence[float],
    budget: Budget,
    fitting: int,
) -> list[Config]:
    """The configurations with how much of the split they evaluate: all of them the same."""
    asked = configs[0].training
    eval_every = asked.eval_every or max(1, math.ceil(fitting / 10))
    parts = []
    for config, step in zip(configs, steps, strict=True):
        rate = step_price(config, dataset.vocab_size) / step
        cheap = min(CHEAP, _WHOLE_SHARE * budget.seconds / len(configs) * rate)
        training = replace(config.training, eval_every=eval_every)
        priced = replace(config, training=training)
        parts.append(affordable_tokens(priced, dataset.vocab_size, dataset.val_tokens, cheap=cheap))
    part = asked.eval_tokens or min((p for p in parts if p is not None), default=None)
    return [replace(c, training=replace(c.training, eval_tokens=part)) for c in configs]


def _closing_evaluations(config: Config, dataset: Dataset, steps: float) -> float:
    """How many evaluations' time measuring the whole split takes in the end, 0 where it is not."""
    part = config.training.eval_tokens
    if part is None or not is_whole_affordable(config, dataset.val_tokens, int(steps), 1):
        return 0.0
    return min(dataset.val_tokens, MOST_TOKENS) / part


def _too_short(budget: Budget, takes: str, pace: Pace) -> AttnlmError:
    used = time.perf_counter() - budget.began
    needed = used + 1.5 * (_FEWEST_STEPS * pace.step + 2 * pace.evaluation)
    needed = max(needed, 1.2 * budget.seconds)
    longer = f"{math.ceil(needed)}s" if needed < 120 else f"{math.ceil(needed / 60)}m"
    return AttnlmError(
        f"{duration(budget.seconds)} are too short for this model on this machine now: {takes}, "
        f"and fewer than {_FEWEST_STEPS} steps fit",
        f"give a smaller model, a smaller `batch_size`, or a `budget` of {longer} or more",
    )
