"""The learning rate of each step."""

from __future__ import annotations

import math

from attnlm.config.training import TrainingConfig


def learning_rate(step: int, config: TrainingConfig, steps: float | None = None) -> float:
    """Return the rate of the update that led to `step`, or of the first update if `step` is 0.

    The rate rises linearly over `warmup` steps and then stays constant. At the end, unless
    `schedule` is constant, the rate falls towards `min_learning_rate`; the fall takes the fraction
    `cooldown` of the steps after the warm-up. `steps` is the number of steps of the run; default:
    `config.max_steps`. Within a budget, the warm-up takes at most a quarter of the steps.
    """
    made = max(0, step - 1)
    highest = config.learning_rate
    warmup = float(config.warmup)
    steps = config.max_steps if steps is None else steps
    if config.budget is not None:
        warmup = min(warmup, steps / 4)
    if made < warmup:
        return highest * ((made + 1) / (warmup + 1))
    falling = config.cooldown * (steps - warmup)
    remaining = (steps - made) / falling if config.schedule != "constant" else 1.0
    if remaining >= 1:
        return highest
    lowest = config.min_learning_rate / highest
    is_linear = config.schedule == "linear"
    height = remaining if is_linear else (1 - math.cos(math.pi * remaining)) / 2
    return highest * (lowest + (1 - lowest) * height)
