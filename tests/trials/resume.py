"""A run that is stopped after any step and goes on is the run that was never stopped."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import attnlm
from attnlm.config.settings import resolve
from attnlm.experiments.settle import _has_compiler
from attnlm.model.architecture import RUNGS
from attnlm.training.one_layer import native_parts
from attnlm.training.step import Stepper
from tests.trials.children import in_child, in_own_process
from tests.trials.small import facts_of, prepared, same_run, settings_of
from tests.trials.trial import Tally, Trial

_STOPS = range(1, 12)
_COMPILED = 3


def _run(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    data = prepared(folder / "given")
    stopped = list(itertools.product(_ways(), _STOPS))
    if cases < len(stopped):
        stopped = random.Random(seed).sample(stopped, cases)
    elif _has_compiler():
        compiled = {"model": "transformer", "dropout": 0.2, "compile": "on", "optimizer": "muon"}
        stopped += [(compiled, stop) for stop in (1, 6, 11)[:_COMPILED]]
    for number, (way, stop) in enumerate(stopped):
        settings = settings_of(way["model"], **way)
        key = "-".join(map(str, way.values()))
        whole, parts = folder / key, folder / f"stopped-{number}"
        outcome = in_child(lambda: _compare(data, whole, parts, settings, stop))  # noqa: B023
        tally.count(outcome.failure, f"{key}, stopped after step {stop}")
        shutil.rmtree(parts, ignore_errors=True)
    return tally


def _ways() -> list[dict[str, Any]]:
    """Every rung with every optimizer and sampling that it takes, dropout on where it has it."""
    ways = []
    for rung, sampling in itertools.product(RUNGS, ("epoch", "random")):
        plain = rung in ("bigram", "average", "dot-product")
        for optimizer in ("adamw",) if plain else ("adamw", "muon"):
            way = {"model": rung, "sampling": sampling, "optimizer": optimizer}
            ways.append(way if plain else {**way, "dropout": 0.2})
            if rung in ("single-head", "multi-head", "wide-head"):
                ways.append(way)  # without dropout they have another, faster way to step
                if sampling == "epoch" and native_parts(resolve({"model": rung}).model):
                    ways.append({**way, "compile": "parts"})
    return ways


def _compare(
    data: Path, whole: Path, parts: Path, settings: dict[str, Any], stop: int
) -> str | None:
    if not whole.exists():
        attnlm.train(data, checkpoint_dir=whole, name="run", **settings)
    original = Stepper.step

    def stepping(self: Stepper, *arguments: Any) -> Any:
        loss = original(self, *arguments)
        if self.state.step == stop:
            signal.raise_signal(signal.SIGTERM)
        return loss

    Stepper.step = stepping  # type: ignore[assignment, method-assign]
    try:
        attnlm.train(data, checkpoint_dir=parts, name="run", **settings)
        return "it was not stopped"
    except KeyboardInterrupt:
        pass
    finally:
        Stepper.step = original  # type: ignore[method-assign]
    if (saved := facts_of(parts / "run" / "last.safetensors")["step"]) != stop:
        return f"step {saved} was saved"
    resumed = attnlm.train(resume=parts / "run")
    return same_run(attnlm.open_run(whole / "run"), resumed)


TRIAL = Trial(
    name="resume",
    promise="stopped after any step and resumed: the same bytes as never stopped",
    short=20,
    full=400,
    run=in_own_process(_run),
    skip=lambda: None if hasattr(signal, "pause") else "it forks",
)
