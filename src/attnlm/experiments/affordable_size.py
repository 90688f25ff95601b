"""Choose the size of a recipe that fits a budget, by trials on this machine and by the text."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.base.settings import Setting, Settings
from attnlm.compute.choices import keeping_threads
from attnlm.compute.device import choose_device
from attnlm.config.settings import Config, resolve
from attnlm.data.dataset import Dataset
from attnlm.experiments.settle import settle, trial
from attnlm.model.sizes import multiplied_weights
from attnlm.training.price import step_price
from attnlm.training.schedule import Clock
from attnlm.training.state import keeping_random_state

# Measured on several texts and budgets: docs/speed.md has the figures.
_TOKENS_PER_WEIGHT = 1.5
"""A size that sees fewer tokens learns no more than the size before it."""
_DROPOUT = ((6.0, 0.0), (12.0, 0.1), (math.inf, 0.2))
"""Pairs of a number of passes over the text and the dropout up to that number."""
_MOST_PASSES = 40.0
"""After this many passes over the text, models only overfit."""
# Fraction of the budget for the trials of all sizes together.
_TRIAL_SHARE = 0.03
# Largest factor by which a larger model may do more operations per second than a smaller one.
_MOST_GAINED = 2.0


def affordable_size(
    sizes: Sequence[Settings],
    settings: Mapping[str, Setting],
    dataset: Dataset,
    began: float,
    on_event: OnEvent,
) -> tuple[Config, float]:
    """Return the largest size of a recipe that sees enough tokens, and the steps that fit the time.

    The sizes are in ascending order, and each is tried briefly until one is too large. The budget
    counts from `began`; steps that would only overfit are left out. `settings` override the recipe
    in every size. Raises AttnlmError if the first size is too large for the data or the memory.
    """
    on_event(Note("measuring how large a model fits into the budget"))
    budget = resolve(settings, sizes[0]).training.budget
    assert budget is not None
    clock, each = Clock.of(budget, began), _TRIAL_SHARE * budget / len(sizes)
    most = _MOST_PASSES * dataset.train_tokens
    chosen, seen, speed, pace = 0, 0.0, math.inf, 0.0
    for number, recipe in enumerate(sizes):
        config = resolve(settings, recipe)
        least = _TOKENS_PER_WEIGHT * multiplied_weights(config.model, dataset.vocab_size)
        price = step_price(config, dataset.vocab_size) / config.tokens_per_step
        hoped = min(most, _seconds_left(clock) * _MOST_GAINED * speed / price)
        if number and (config.model.block_size > dataset.largest_block_size or hoped < least):
            break
        try:
            seconds = _seconds_per_token(config, dataset, each)
        except (AttnlmError, torch.OutOfMemoryError):  # the size takes too much memory or time
            if not number:
                raise
            break
        tokens = min(most, _seconds_left(clock) / seconds)
        if number and tokens < least:
            break
        chosen, seen, speed, pace = number, tokens, price / seconds, seconds
    passes = seen / dataset.train_tokens
    dropout = next(share for most, share in _DROPOUT if passes <= most)
    config = resolve(settings, sizes[chosen])
    if "dropout" in config.model.settings():  # a recipe's own dropout overrides this rule
        config = resolve(settings, {"dropout": dropout, **sizes[chosen]})
    on_event(Note(_in_words(config, passes)))
    useful = math.ceil(most / config.tokens_per_step)
    fitting = _seconds_left(clock) / pace / config.tokens_per_step
    if useful < 2 * fitting:
        config = replace(config, training=replace(config.training, steps=useful))
    return config, min(useful, fitting)


def _seconds_per_token(config: Config, dataset: Dataset, least: float) -> float:
    """Return the seconds per token of training, measured for `least` seconds or two steps."""
    device = choose_device(config.training.device, config.training.dtype)
    with keeping_threads(), keeping_random_state(device):  # each trial begins with all threads
        stepper = trial(settle(config, device, dataset).config, device, dataset)
        began = time.perf_counter()
        stepper.step().item()  # the first step is slower than others
        since = now = time.perf_counter()
        while now == since or now - began < least:
            stepper.step().item()
            now = time.perf_counter()
        return (now - since) / (stepper.state.step - 1) / config.tokens_per_step


def _seconds_left(clock: Clock) -> float:
    return clock.ends - time.perf_counter()


def _in_words(config: Config, passes: float) -> str:
    a = config.model
    size = f"{a.layers} layers × {a.embed_dim}" if a.layers > 1 else f"1 layer × {a.embed_dim}"
    if passes < _MOST_PASSES:
        often = f"about {passes:.2g} epochs"
    else:
        often = f"{_MOST_PASSES:g} epochs, the maximum"
    return f"{size}, context {a.block_size}, dropout {a.dropout:g}: {often}"
