"""Train one model with several seeds, and state how much its loss depends on the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base.errors import UsageError
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from attnlm.see.verdicts import interval
from attnlm.workflows.train import train


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one model with consecutive seeds, and the loss of each."""

    runs: Sequence[Run]
    losses: Sequence[float]
    """the validation losses of the runs' best checkpoints, in nats per token"""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval, by Student's t, for the mean loss of all seeds that there are."""
        return interval(self.losses)


def train_seeds(
    dataset: str | Path | Dataset | None = None, *, seeds: int = 3, **options: Any
) -> SeedRuns:
    """Train a model with several seeds, one after the other, and return the runs.

        seed_runs = attnlm.train_seeds("tales-char", seeds=3, model="multi-head", steps=500)
        print(seed_runs.losses, seed_runs.interval)

    `options` are arguments of `train`. The first run has the `seed` and `name`, and each later run
    the next seed K and the name `<name>-seed-K`. A `budget` is the time of the first run; each
    later run makes as many steps.

    Raises as `train` does, and UsageError for less than two seeds.
    """
    check_seeds(seeds, options.get("resume"), options.get("processes"))
    return add_seeds(train(dataset, **options), dataset, seeds, options)


def check_seeds(seeds: int, resume: object, processes: object) -> None:
    """Raise UsageError for less than two seeds, and for arguments that allow only one run."""
    if seeds < 2:
        raise UsageError(f"invalid value for `seeds`: {seeds}", "use 2 or more")
    for name, value in {"resume": resume, "processes": processes}.items():
        if value not in (None, 1):
            raise UsageError(f"`seeds` and `{name}` cannot be combined", "use only one")


def add_seeds(
    first: Run, dataset: str | Path | Dataset | None, seeds: int, options: Mapping[str, Any]
) -> SeedRuns:
    """Train the model of the run `first` with the next seeds, and return all runs.

    `options` are the arguments of `train` with which the first run was trained.
    """
    kept = ("start_from", "checkpoint", "exist_ok", "force", "checkpoint_dir", "data_dir", "log")
    options = {key: options[key] for key in (*kept, "verify", "on_event") if key in options}
    training = first.config.training.complete()
    every = training.eval_every or math.ceil(training.max_steps / 10)
    recipe = first.config.with_training(budget=None, eval_every=every).settings()
    runs = [first]
    for seed in range(training.seed + 1, training.seed + seeds):
        name = f"{first.name}-seed-{seed}"
        runs.append(train(dataset, recipe=recipe, seed=seed, name=name, **options))
    results = [result for run in runs if (result := run.result()) is not None]
    is_whole = all(result.whole for result in results)
    return SeedRuns(
        runs, [(result.final if is_whole else result.best).val_loss for result in results]
    )
