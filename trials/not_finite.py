"""NaN and infinity in loss, gradient or weights, at any step."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

import attnlm
from attnlm.model.architecture import RUNGS
from trials.forked_children import in_child
from trials.small_projects import around_steps, facts_of, prepared, settings_of
from trials.trial import Tally, Trial

_KINDS = ("loss", "gradient", "weights")


@Trial("numbers", short=7, full=210, forks=True)
def _numbers(tally: Tally, folder: Path) -> None:
    """NaN or infinity stops the run and names the step; no such number is ever saved."""
    data = prepared(folder / "given")
    for case, generator in tally.drawn(tally.wanted):
        rung, kind = RUNGS[case % len(RUNGS)], _KINDS[case % len(_KINDS)]
        value = generator.choice((float("nan"), float("inf"), -float("inf")))
        step, stops = generator.randrange(1, 13), generator.random() < 0.3
        runs = folder / "runs"
        outcome = in_child(_train, data, runs, rung, kind, value, step, stops, generator)
        name = f"{rung}, {value} in {kind} at step {step}{', then Ctrl-C' if stops else ''}"
        tally.count(outcome.failure, name)
        shutil.rmtree(runs)


def _train(
    data: Path,
    runs: Path,
    rung: str,
    kind: str,
    value: float,
    step: int,
    stops: bool,
    generator: Random,
) -> str | None:
    def spoil(vector: torch.Tensor) -> None:
        vector[generator.randrange(len(vector))] = value

    def before(stepper: Any) -> None:
        replica = stepper._replicas[0]
        backward = replica.backward

        def spoiling(*batch: Any) -> torch.Tensor:
            loss: torch.Tensor = backward(*batch)
            if kind == "gradient":
                spoil(stepper.state.optimizer.gradient)
            return loss + value if kind == "loss" else loss

        if stepper.state.step + 1 == step and kind != "weights":
            replica.backward = spoiling

    def after(stepper: Any) -> None:
        if stepper.state.step == step and kind == "weights":
            spoil(next(iter(stepper.state.optimizer.weights().values())))
        if stepper.state.step == step and stops:
            signal.raise_signal(signal.SIGINT)

    try:
        with around_steps(before, after):
            attnlm.train(data, checkpoint_dir=runs, name="run", **settings_of(rung))
    except attnlm.AttnlmError as error:
        return _told(error, step) or _kept(runs / "run", error, step)
    except KeyboardInterrupt:
        return "it was stopped, and said nothing"
    return "it went on"


def _told(error: attnlm.AttnlmError, step: int) -> str | None:
    """Return what is missing in the message (when it went wrong) and the hint."""
    when = re.search(r"\((?:at step (\d+)|between steps (\d+) and (\d+))\)$", error.message)
    numbers = [int(number) for number in when.groups() if number] if when else []
    if not numbers or not numbers[0] <= step <= numbers[-1]:
        return f"the step is not in {error.message!r}"
    return None if "lower `learning_rate`" in error.hint else f"the hint is {error.hint!r}"


def _kept(path: Path, error: attnlm.AttnlmError, step: int) -> str | None:
    """Return what is wrong unless the last checkpoint is from before, is named, and is finite."""
    run = attnlm.open_run(path)
    if not run.last.exists():
        return "there is no checkpoint"
    saved = facts_of(run.last)["step"]
    if saved >= step or saved < (step - 1) // 4 * 4:
        return f"step {saved} was kept"
    if f"{run.last} has step {saved}" not in error.hint:
        return f"the checkpoint of step {saved} is not in {error.hint!r}"
    for which in ("best", "last"):
        for name, tensor in load_file(str(run.checkpoint(which).path)).items():
            if not tensor.isfinite().all():
                return f"{name} in {which} is not finite"
    return None
