"""What changes from step to step: made anew, or as a checkpoint holds it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlm.base.errors import AttnlmError
from attnlm.compute.device import Device
from attnlm.compute.processes import Processes
from attnlm.config.settings import Config
from attnlm.model.language_model import LanguageModel, build_model
from attnlm.runs.checkpoint import load_checkpoint
from attnlm.runs.run import Run
from attnlm.training.optimizer import FlatOptimizer


@dataclass
class TrainingState:
    """What changes from step to step: saved with the weights, all but the device."""

    model: LanguageModel
    optimizer: FlatOptimizer
    device: Device
    step: int = 0
    evaluated_step: int = -1
    """The step of the newest evaluation; −1 before there is one."""
    best_step: int = 0
    best_loss: float = math.inf
    stale: int = 0
    """Evaluations since the best one."""
    loss_sum: float = 0.0
    """Of the training losses since the newest evaluation."""
    seconds: float = 0.0
    """Wall time of the run, evaluations and saving included, but not what listeners do. Not saved
    with the weights."""
    saved_step: int | None = None
    """The step of the last checkpoint on disk."""

    def evaluated(self, loss: float) -> None:
        """Notes an evaluation of the weights as they are."""
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.stale = loss, self.step, 0
        else:
            self.stale += 1
        self.evaluated_step, self.loss_sum = self.step, 0.0

    def copy_from_main(self, processes: Processes) -> None:
        """Makes it the main process' state."""
        for name, value in processes.from_main(self.facts()).items():
            setattr(self, name, value)
        for vector in self.optimizer.vectors():
            processes.copy_from_main(vector)

    def facts(self) -> dict[str, Any]:
        """What is saved beside the tensors. Batches and dropout follow from seed and step."""
        return {name: getattr(self, name) for name in _FACTS}


_FACTS = ("step", "evaluated_step", "best_step", "best_loss", "stale", "loss_sum")


def keeping_random_state(device: Device) -> contextlib.AbstractContextManager[None]:
    """Gives the caller's random state back afterwards, that of the device too."""
    return torch.random.fork_rng([device.torch] if device.name == "cuda" else [])


def initial_state(config: Config, vocab_size: int, device: Device) -> TrainingState:
    """The state before the first step; the weights follow from the seed."""
    assert config.training.seed is not None
    with keeping_random_state(device):
        torch.manual_seed(config.training.seed)
        model = build_model(config.model, vocab_size).to(device.torch)
    return TrainingState(model, FlatOptimizer(model, config.training), device)


def saved_state(run: Run, device: Device) -> TrainingState:
    """The state that the run's last checkpoint holds. Raises AttnlmError as reading it does."""
    model, facts, tensors = load_checkpoint(run.last, run.config.model, run.vocab_size)
    model.to(device.torch)
    optimizer = FlatOptimizer(model, run.config.training)
    state = TrainingState(model, optimizer, device)
    known = all(type(facts.get(name)) is type(getattr(state, name)) for name in _FACTS)
    if not known or not _fit_together(facts) or optimizer.state().keys() != tensors.keys():
        raise AttnlmError(
            f"{run.last} does not hold the state that its run describes",
            "copy the run's folder again from where it came",
        )
    optimizer.load_state(tensors)
    saved = {name: facts[name] for name in _FACTS}
    records = run.metrics_until(facts["evaluated_step"])
    older = facts.get("seconds", 0.0)  # which is where older versions kept them
    seconds = max([older, run.stopped_after, *(record["seconds"] for record in records)])
    return replace(state, **saved, seconds=seconds, saved_step=facts["step"])


def _fit_together(facts: Mapping[str, Any]) -> bool:
    """Whether facts of the right types are those of a run: steps in order, sums in float32."""
    older = facts.get("seconds", 0.0)
    return (
        -1 <= facts["evaluated_step"] <= facts["step"]
        and 0 <= facts["best_step"] <= max(0, facts["evaluated_step"])
        and not math.isnan(facts["best_loss"])
        and facts["stale"] >= 0
        and abs(facts["loss_sum"]) <= torch.finfo(torch.float32).max
        and type(older) is float
        and 0 <= older < math.inf
    )
