"""Train one model with several seeds, and state how much its loss depends on the seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base.errors import UsageError
from attnlm.config.resolve import Resolved
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

        found = attnlm.train_seeds("tales-char", seeds=3, model="multi-head", steps=500)
        print(found.losses, found.interval)

    `options` are arguments of `train`. The first run has the `seed` and `name`, and each later run
    the next seed K and the name `<name>-seed-K`. A `budget` is the time of the first run; each
    later run makes as many steps.

    Raises as `train` does, and UsageError for less than two seeds.
    """
    if seeds < 2:
        raise UsageError(f"invalid value for `seeds`: {seeds}", "use 2 or more")
    for name in [one for one in ("resume", "processes") if options.get(one) not in (None, 1)]:
        raise UsageError(f"`seeds` and `{name}` cannot be combined", "use only one of them")
    runs = [train(dataset, **options)]
    config, name = runs[0].config, runs[0].name
    kept = ("start_from", "checkpoint", "exist_ok", "force", "checkpoint_dir", "data_dir", "log")
    options = {key: options[key] for key in (*kept, "verify", "on_event") if key in options}
    first, every = config.training.seed or 0, math.ceil((config.training.steps or 1) / 10)
    config = config.with_training(budget=None, eval_every=config.training.eval_every or every)
    for seed in range(first + 1, first + seeds):
        asked = Resolved(config.with_training(seed=seed))
        runs.append(train(dataset, recipe=asked, name=f"{name}-seed-{seed}", **options))
    results = [result for run in runs if (result := run.result()) is not None]
    is_whole = all(result.whole for result in results)
    return SeedRuns(runs, [(one.final if is_whole else one.best).val_loss for one in results])
