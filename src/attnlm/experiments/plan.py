"""What a training costs, told before it is paid: memory, operations, time, and how they grow."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.settings import Setting, quoted
from attnlm.compute.choices import keeping_threads
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.processes import Processes, joined
from attnlm.config.new_training import resolve_planned
from attnlm.config.settings import Config, resolve, with_steps
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, Ids, id_dtype, open_dataset
from attnlm.experiments.other_processes import check_launched
from attnlm.experiments.settle import settle
from attnlm.runs.open_run import open_run
from attnlm.runs.parent import check_tokenizer
from attnlm.runs.run import Run
from attnlm.training.plan import Plan
from attnlm.training.state import initial_state, keeping_random_state
from attnlm.training.step import Stepper, TrainingData

USUAL_SHARE = 0.4
"""Of a GPU's peak: large trainings have reached 0.38 to 0.46 (Chowdhery et al., 2022; Grattafiori
et al., 2024)."""

# A measurement: steps that are not counted, and those that are; more where they take no second
# together, fewer where they take a minute.
_FIRST, _STEPS = 2, 10
_SHORTEST, _LONGEST = 1.0, 60.0
# Where there is no data set: long enough for every evaluation.
_VAL_TOKENS = 2**20
_MADE_UP_WINDOWS = 64


def plan(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | None = None,
    vocab_size: int | None = None,
    tokens: int | None = None,
    peak: float | None = None,
    share: float | None = None,
    start_from: str | Path | Run | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    on_event: OnEvent | None = None,
    **settings: Setting,
) -> Plan:
    """What it costs to train with these settings, which are those of `train`.

    A vocabulary of `vocab_size` stands for a data set. Ten steps are measured on this machine, by
    as many processes as have been started; or else each process is said to reach `share` of `peak`
    FLOP/s. `tokens` is the budget; default: 20 per parameter, of adapters one pass over the data.
    With `start_from` the model is that of another run, whose weights are not read.

    Raises AttnlmError as `train` does, and where what is to be measured does not fit.
    """
    _check(dataset, vocab_size, tokens, peak, share)
    if tokens is not None and "steps" in settings:
        raise UsageError("`tokens` and `steps` exclude each other", "give one of them")
    with joined() as processes:
        if processes.count > 1:
            settings = {"processes": processes.count, **settings}
        parent = weights = None
        if start_from is not None:
            parent = open_run(start_from, checkpoint_dir=checkpoint_dir)
            weights = parent.config.model, parent.name
        config = resolve_planned(settings, None if recipe is None else str(recipe), weights)
        opened = _data(dataset, vocab_size, config, parent, data_dir)
        if tokens is None and "steps" in settings and config.training.steps is not None:
            tokens = config.training.steps * config.tokens_per_step
        if tokens is None and config.training.adapters is not None:
            if vocab_size is not None:
                raise UsageError(
                    "adapters have no usual number of tokens, and there is no data set to go by",
                    "give `tokens` or `steps`",
                )
            tokens = len(opened.train)
        name = config.training.device
        if peak is None:
            check_launched(config.training, processes)
            name, config, seconds = _measured(config, opened, processes, on_event or ignore)
            return Plan(config, opened.vocab_size, opened.val_tokens, name, tokens, seconds)
    name = choose_device().name if name == "auto" else name
    stated = Plan(config, opened.vocab_size, opened.val_tokens, name, tokens, 1.0)
    if not stated.step_flops:
        raise UsageError(
            f"{config.model.model} has no matrix products: a `peak` says nothing about its time",
            "leave `peak` out: its steps are then measured",
        )
    share = USUAL_SHARE if share is None else share
    seconds = stated.step_flops / (peak * share)
    return replace(stated, step_seconds=seconds, peak=peak, share=share)


def _data(
    dataset: str | Path | Dataset | None,
    vocab_size: int | None,
    config: Config,
    parent: Run | None,
    data_dir: str | Path,
) -> TrainingData:
    if vocab_size is not None:
        if parent is not None and vocab_size != parent.vocab_size:
            raise UsageError(
                f"`vocab_size` can't be {vocab_size:,}, since {parent.name} has "
                f"{parent.vocab_size:,} ids",
                "leave it out, or give the same",
            )
        return _made_up(vocab_size, config)
    opened = open_dataset(dataset, data_dir=data_dir)
    if parent is not None:
        check_tokenizer(parent, opened)
    return opened


def _check(
    dataset: object,
    vocab_size: int | None,
    tokens: int | None,
    peak: float | None,
    share: float | None,
) -> None:
    if dataset is not None and vocab_size is not None:
        raise UsageError("a data set and `vocab_size` exclude each other", "give one of them")
    if share is not None and peak is None:
        raise UsageError(
            "`share` needs the `peak` that it is a share of", "such as 989e12, in FLOP/s"
        )
    for name, value, least, most in (
        *(("vocab_size", vocab_size, 1, 2**32), ("tokens", tokens, 1, 10**18)),
        *(("peak", peak, 1e6, 1e21), ("share", share, 1e-6, 1)),
    ):
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"`{name}` {quoted(value)} is out of range",
                f"it must be at least {least:g}, at most {most:g}",
            )


class _MadeUp(NamedTuple):
    """Random ids in place of a data set."""

    train: Ids
    vocab_size: int
    val_tokens: int


def _made_up(vocab_size: int, config: Config) -> _MadeUp:
    length = _MADE_UP_WINDOWS * config.model.block_size + 1
    ids = np.random.default_rng(0).integers(vocab_size, size=length)
    train: Any = ids.astype(id_dtype(vocab_size))
    return _MadeUp(train, vocab_size, _VAL_TOKENS)


def _measured(
    config: Config, data: TrainingData, processes: Processes, on_event: OnEvent
) -> tuple[str, Config, float]:
    """The device, the configuration as it is trained there, and the seconds of a step."""
    device = _device_here(config.training)
    training = replace(config.training, seed=config.training.seed or 0)
    try:
        with keeping_threads(), keeping_random_state(device):
            if processes.is_main:
                on_event(Note("measuring ten steps"))
                config = settle(replace(config, training=training), device, data).config
            config = resolve({}, processes.from_main(config.settings()))
            use_precision(device)
            trial = replace(config, training=with_steps(config.training, 2**30))
            state = initial_state(trial, data.vocab_size, device, processes)
            return device.name, config, _step_seconds(Stepper(state, trial, data, processes))
    except torch.OutOfMemoryError:
        raise AttnlmError(
            f"the memory of {device.name} is too small for a step",
            "lower `micro_batch_size`, or give the `peak` of a larger device",
        ) from None


def _device_here(training: TrainingConfig) -> Device:
    try:
        return choose_device(training.device, training.dtype)
    except UsageError:
        raise
    except AttnlmError as error:
        hint = f"{error.hint}; for one that is elsewhere, give its `peak`"
        raise AttnlmError(error.message, hint) from None


def _step_seconds(stepper: Stepper) -> float:
    """The mean of ten steps, or of so many that they can be told."""
    for _ in range(_FIRST):
        began = time.perf_counter()
        stepper.step().item()
        once = time.perf_counter() - began
    count = max(1, min(max(_STEPS, math.ceil(_SHORTEST / once)), int(_LONGEST / once)))
    count = int(stepper.processes.from_main(count))
    began = time.perf_counter()
    for _ in range(count):
        loss = stepper.step()
    loss.item()
    return (time.perf_counter() - began) / count
