"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from attnlm.config.stages import parsed_stages
from attnlm.config.training import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of the update that led to `step`; before any update, of the first."""
    return config.learning_rate * learning_rate_factor(max(0, step - 1), config)


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """The share of the highest learning rate that step 0 … steps − 1 is taken with.

    It rises in a line over `warmup` steps, stays, and falls towards 0 over the last `cooldown`
    fraction of the steps after the warm-up. One function of step and total: nothing to store.
    """
    place, steps = _place(step, config)
    if place < config.warmup:
        return (place + 1) / (config.warmup + 1)
    falling = config.cooldown * (steps - config.warmup)
    left = (steps - place) / falling if config.schedule != "constant" else 1.0
    if left >= 1:
        return 1.0
    return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


def _place(step: int, config: TrainingConfig) -> tuple[float, int]:
    """Where a step stands in the schedule, and how long that is.

    Of a run that was planned again, both are in steps of its first plan: each later one goes from
    where it begins to the same end in as many steps as it has left, so that nothing jumps.
    """
    assert config.steps is not None
    if config.stages is None:
        return step, config.steps
    first, *later = parsed_stages(config.stages)
    ends = [*(stage.begin for stage in later), config.steps]
    left: float = first.steps - min(step, ends[0])
    for stage, end in zip(later, ends[1:], strict=True):
        if step > stage.begin:
            left *= (stage.steps - min(step, end)) / (stage.steps - stage.begin)
    return first.steps - left, first.steps
