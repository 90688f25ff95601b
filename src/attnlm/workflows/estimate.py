"""Estimate what a training run costs before it starts: parameters, memory, operations, time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlm.base.errors import UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR
from attnlm.base.process import budget_start
from attnlm.base.setting_fields import check_value
from attnlm.compute.device import Device
from attnlm.compute.threads import cores, torch_settings_restored
from attnlm.config.settings import Config, Request, resolve_new
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.spec import parameter_count
from attnlm.runs.records import RunFacts
from attnlm.runs.run import Run, open_run
from attnlm.training.memory import estimate_memory
from attnlm.workflows.autotune import random_dataset, time_step
from attnlm.workflows.train import check_resume, new_config, open_rest, open_saved_run

_MEASURED = 2.0  # seconds of steps


@dataclass(frozen=True)
class Estimate:
    """What a training run costs: counted, estimated and, for the time of a step, measured."""

    config: Config
    """the configuration, with what `train` chooses"""
    vocab_size: int
    device: Device
    parameters: int
    memory: int
    """bytes that each process takes in addition to PyTorch, within a factor of 2 on a CPU"""
    step_flops: int
    """the operations of the model in a step of all processes, forward and backward"""
    steps: int
    """steps that are left to make; with a budget, those that fit into its rest"""
    flops: int
    """the operations of all `steps`"""
    step_seconds: float
    seconds: float
    """the time of all `steps`, without evaluations and checkpoints"""
    tokens_per_second: float

    def facts(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        names = ("config", "device")
        numbers = {name: value for name, value in vars(self).items() if name not in names}
        return {"settings": self.config.settings(), "device": self.device.name, **numbers}


def estimate(
    dataset: str | Path | Dataset | None = None,
    *,
    vocab_size: int | None = None,
    recipe: str | Path | Mapping[str, Any] | None = None,
    resume: str | Path | Run | None = None,
    start_from: str | Path | Run | None = None,
    force: bool = False,
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
    on_event: OnEvent | None = None,
    **settings: Any,
) -> Estimate:
    """Return what `train` would cost with the same arguments, without writing anything.

        cost = attnlm.estimate("tales-char", model="transformer", steps=500)
        print(cost.parameters, cost.memory, cost.seconds)

    The time of a step is measured over about two seconds. If `vocab_size` is given, random tokens
    take the place of a data set. With several `processes`, none is started: this process measures
    its part of the batch, and the communication between processes does not count.

    Raises AttnlmError for the same reasons as `train`.
    """
    on_event = on_event or ignore
    began = budget_start()
    made, progress = 0, 0.0
    with torch_settings_restored():
        if resume is not None:
            of_new = {"dataset": dataset, "vocab_size": vocab_size, "recipe": recipe}
            check_resume(settings, **of_new, start_from=start_from, force=force)
            run = open_saved_run(resume, checkpoint_dir, data_dir)
            saved = run.facts(run.last)
            made, progress = saved.step, saved.progress
            config, data, device = open_rest(run, saved, settings, None, on_event)
        else:
            parent = None
            if start_from is not None:
                parent = open_run(start_from, checkpoint_dir=checkpoint_dir)
            request = resolve_new(settings, recipe, parent)
            processes = request.config.training.processes
            if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(max(1, cores() // processes))  # as several have
            if vocab_size is not None:
                data, parent = _random_data(vocab_size, dataset, request), None
            else:
                data = open_dataset(dataset, data_dir=data_dir)
            config, device, _ = new_config(request, data, parent, force, began, on_event)
        on_event(Note("measuring the time of a step"))
        seconds, fitting = time_step(config, device, data, _MEASURED)
        config = config.with_training(micro_batch_size=fitting)  # memory may have run out
    steps = config.training.max_steps - made
    if config.training.budget is not None:
        steps = min(steps, (1 - progress) * config.training.budget // seconds)
    V, spec = data.vocab_size, config.spec
    step_flops = spec.costs(V).training_flops * config.tokens_per_step
    return Estimate(
        config,
        V,
        device,
        parameters=parameter_count(spec, V),
        memory=estimate_memory(config, V, device.name).total,
        step_flops=step_flops,
        steps=int(steps),
        flops=int(steps) * step_flops,
        step_seconds=seconds,
        seconds=int(steps) * seconds,
        tokens_per_second=config.tokens_per_step / seconds,
    )


def _random_data(vocab_size: int, dataset: object, request: Request) -> Dataset:
    """Return random tokens in place of a data set, after checking the arguments."""
    if dataset is not None:
        raise UsageError("a data set and `vocab_size` cannot be combined", "use only one")
    if len(request.sizes) > 1:
        raise UsageError(
            "this recipe chooses the size of the model for a text",
            "name a data set, or use another recipe",
        )
    check_value(RunFacts, "vocab_size", vocab_size)
    tokenizer: Any = request.sizes[0].get("tokenizer")
    return random_dataset(vocab_size, request.config.spec.block_size, tokenizer)
