"""Which size of a recipe a budget is enough for: by trials on this machine, and by the text."""

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
from attnlm.experiments.budget import TRIAL_SHARE, Budget, seconds_per_step
from attnlm.experiments.settle import settle
from attnlm.model.sizes import multiplied_weights
from attnlm.training.price import step_price

# Measured on several texts and budgets: docs/training.md has the figures.
_TOKENS_PER_WEIGHT = 1.5
"""A size that sees fewer learns no more than the one before it."""
_DROPOUT = ((6.0, 0.0), (12.0, 0.1), (math.inf, 0.2))
"""Up to so many passes over the text, so much."""
_MOST_PASSES = 40.0
"""After these, models only learn the text by heart."""
# By how much a larger model may make more operations a second than a smaller one.
_MOST_GAINED = 2.0


def affordable_size(
    sizes: Sequence[Settings],
    settings: Mapping[str, Setting],
    dataset: Dataset,
    budget: Budget,
    on_event: OnEvent,
) -> tuple[Config, Budget]:
    """The largest size of a recipe that sees enough tokens in the time, and as many as are of use.

    The sizes are in order, and each is tried for a moment until one is too large. `settings` are
    those given beside the recipe, which hold for every size. Raises AttnlmError where the first is
    too large for the data, the memory or the time.
    """
    on_event(Note("measuring how large a model there is time for"))
    share = TRIAL_SHARE / len(sizes)
    most = _MOST_PASSES * dataset.train_tokens
    chosen, seen, speed = 0, 0.0, math.inf
    for number, recipe in enumerate(sizes):
        config = resolve(settings, recipe)
        least = _TOKENS_PER_WEIGHT * multiplied_weights(config.model, dataset.vocab_size)
        price = step_price(config, dataset.vocab_size) / config.tokens_per_step
        hoped = min(most, _seconds_left(budget) * _MOST_GAINED * speed / price)
        if number and (config.model.block_size > dataset.largest_block_size or hoped < least):
            break
        try:
            seconds = _seconds_per_token(config, dataset, budget, share)
        except (AttnlmError, torch.OutOfMemoryError):  # it takes too much memory or time
            if not number:
                raise
            break
        tokens = min(most, _seconds_left(budget) / seconds)
        if number and tokens < least:
            break
        chosen, seen, speed = number, tokens, price / seconds
    passes = seen / dataset.train_tokens
    dropout = next(share for most, share in _DROPOUT if passes <= most)
    config = resolve(settings, sizes[chosen])
    if "dropout" in config.model.settings():  # the recipe's own goes before the rule's
        config = resolve(settings, {"dropout": dropout, **sizes[chosen]})
    on_event(Note(_in_words(config, passes)))
    return config, replace(budget, most_steps=math.ceil(most / config.tokens_per_step))


def _seconds_per_token(config: Config, dataset: Dataset, budget: Budget, share: float) -> float:
    device = choose_device(config.training.device, config.training.dtype)
    with keeping_threads():  # each trial begins with all of them
        config = settle(config, device, dataset).config
        return seconds_per_step(config, dataset, device, budget, share) / config.tokens_per_step


def _seconds_left(budget: Budget) -> float:
    return budget.ends - time.perf_counter()


def _in_words(config: Config, passes: float) -> str:
    a = config.model
    size = f"{a.layers} layers × {a.embed_dim}" if a.layers > 1 else f"1 layer × {a.embed_dim}"
    if passes < _MOST_PASSES:
        often = f"about {passes:.2g} passes over the text"
    else:
        often = f"{_MOST_PASSES:g} passes over the text, since more would not help"
    return f"{size}, context {a.block_size}, dropout {a.dropout:g}: {often}"
