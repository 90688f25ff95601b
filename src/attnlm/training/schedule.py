"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from attnlm.config.settings import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of the update that led to `step`; before any update, of the first."""
    return config.learning_rate * learning_rate_factor(max(0, step - 1), config)


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """The share of the highest learning rate that step 0 … steps − 1 is taken with.

    It rises in a line over `warmup` steps, stays, and falls towards 0 over the last `cooldown`
    fraction of the steps after the warm-up. One function of step and total: nothing to store.
    """
    assert config.steps is not None
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    falling = config.cooldown * (config.steps - config.warmup)
    left = (config.steps - step) / falling if config.schedule != "constant" else 1.0
    if left >= 1:
        return 1.0
    return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
