"""NaN and infinity in loss, gradient or weights, at any step."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import torch

import attnlm
from tests.trials.children import in_child, in_own_process
from tests.trials.internals import RUNGS, Stepper
from tests.trials.small import facts_of, prepared, settings_of
from tests.trials.trial import Tally, Trial

_KINDS = ("loss", "gradient", "weights")


def _run(tally: Tally, folder: Path) -> None:
    data = prepared(folder / "given")
    for case, generator in tally.drawn(tally.wanted):
        rung = RUNGS[case % len(RUNGS)]
        kind = _KINDS[case // len(RUNGS) % len(_KINDS)]
        value = generator.choice((float("nan"), float("inf"), -float("inf")))
        step = generator.randrange(1, 13)
        place, stops = generator.random(), generator.random() < 0.3
        settings = settings_of(rung)
        runs = folder / "runs"
        outcome = in_child(
            lambda: _train(data, runs, settings, kind, value, step, place, stops)  # noqa: B023
        )
        name = f"{rung}, {value} in {kind} at step {step}{', then Ctrl-C' if stops else ''}"
        tally.count(outcome.failure, name)
        shutil.rmtree(runs)


def _train(
    data: Path,
    runs: Path,
    settings: dict[str, Any],
    kind: str,
    value: float,
    step: int,
    place: float,
    stops: bool,
) -> str | None:
    original = Stepper.step

    def stepping(self: Stepper) -> torch.Tensor:
        if self.state.step + 1 == step and kind != "weights":
            self._shares[0] = _spoiled(self, kind, value, place)
        loss = original(self)
        if self.state.step == step:
            if kind == "weights":
                _spoil(self.state.optimizer._weights[0], value, place)
            if stops:
                signal.raise_signal(signal.SIGINT)
        return loss

    Stepper.step = stepping  # type: ignore[method-assign]
    try:
        attnlm.train(data, checkpoint_dir=runs, name="run", **settings)
    except attnlm.AttnlmError as error:
        return _told(error, kind, step) or _kept(runs / "run", error, step)
    except KeyboardInterrupt:
        return "it was stopped, and said nothing"
    return "it went on"


def _spoiled(stepper: Stepper, kind: str, value: float, place: float) -> Any:
    share = stepper._shares[0]

    def spoiling(*batch: Any) -> torch.Tensor:
        loss = share(*batch)
        if kind == "loss":
            return loss + value
        _spoil(stepper.state.optimizer.gradient, value, place)
        return loss

    return spoiling


def _spoil(vector: torch.Tensor, value: float, place: float) -> None:
    vector[int(place * len(vector))] = value


def _told(error: attnlm.AttnlmError, kind: str, step: int) -> str | None:
    """Whether the message names what went wrong, and when, and the hint what to lower."""
    when = re.search(r"(?:at step (\d+)|between steps (\d+) and (\d+))$", error.message)
    numbers = [int(number) for number in when.groups() if number] if when else []
    if not numbers or not numbers[0] <= step <= numbers[-1]:
        return f"the step is not in {error.message!r}"
    if kind not in error.message or "finite" not in error.message:
        return f"{error.message!r}"
    return None if "lower `learning_rate`" in error.hint else f"the hint is {error.hint!r}"


def _kept(path: Path, error: attnlm.AttnlmError, step: int) -> str | None:
    """Whether the last checkpoint is one from before, is named, and all on disk is finite."""
    from safetensors.torch import load_file

    run = attnlm.open_run(path)
    if not run.last.exists():
        return "there is no checkpoint"
    saved = facts_of(run.last)["step"]
    if saved >= step or saved < (step - 1) // 4 * 4:
        return f"step {saved} was kept"
    if f"{run.last} keeps step {saved}" not in error.hint:
        return f"the checkpoint of step {saved} is not in {error.hint!r}"
    for which in ("best", "last"):
        for name, tensor in load_file(str(run.checkpoint(which).path)).items():
            if not tensor.isfinite().all():
                return f"{name} in {which} is not finite"
    return None


TRIAL = Trial(
    name="numbers",
    promise="NaN or infinity stops the run by name and step; no such number is ever saved",
    short=21,
    full=210,
    run=in_own_process(_run),
    skip=lambda: None if hasattr(signal, "pause") else "it forks",
)
