"""The scores of heads in the snapshots of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.model.recorder import no_attention_error
from attnlm.model.spec import Use
from attnlm.runs.run import Run, open_run
from attnlm.see.attend import Numbers
from attnlm.see.head_scores import PATTERNS
from attnlm.see.heat_maps import Grid, HeatMaps

_MOST_SNAPSHOTS = 11  # in a table, which then has 80 columns


@dataclass(frozen=True, repr=False)
class HeadsOverTraining:
    """The scores of all heads of a run at each of S snapshots."""

    run: str
    steps: list[int]
    """the step of each snapshot"""
    scores: dict[str, Numbers]
    """(S, L, H): how the scores of each pattern change"""

    def __repr__(self) -> str:
        return f"<HeadsOverTraining of {self.run!r}: {len(self.steps)} snapshots>"

    def __str__(self) -> str:
        """Return a table for each pattern, with a row for each head."""
        return str(self.maps)

    @property
    def maps(self) -> HeatMaps:
        """The scores as tables: heads by steps, of which the first, the last and 9 others."""
        last = len(self.steps) - 1
        shown = np.linspace(0, last, min(last + 1, _MOST_SNAPSHOTS)).round().astype(int)
        layers, heads = next(iter(self.scores.values())).shape[1:]
        rows = [f"layer {n + 1} head {h + 1}" for n, h in np.ndindex(layers, heads)]
        steps = [str(self.steps[number]) for number in shown]
        grids = [
            Grid(pattern, rows, steps, scores_SLH[shown].reshape(len(shown), -1).T, "step")
            for pattern, scores_SLH in self.scores.items()
        ]
        caption = f"Scores of the heads of {self.run} in snapshots during its training"
        return HeatMaps(f"{self.run}: heads over training", [caption], grids)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        rounded = {name: x.astype(float).round(3).tolist() for name, x in self.scores.items()}
        return {**vars(self), "scores": rounded}


def heads_over_training(
    run: str | Path | Run | None = None, *, checkpoint_dir: str | Path = "checkpoints"
) -> HeadsOverTraining:
    """Return the scores of every head of a run (default: the one trained last) in each snapshot.

        over_training = attnlm.heads_over_training("transformer-001")
        over_training.scores["induction"][:, 1, 0]  # of layer 2, head 1, at over_training.steps
        print(over_training)  # as tables

    Training measured them as `heads` does, over fewer windows, and kept them in the run's
    snapshots. Raises AttnlmError for a run without such snapshots, for a damaged file, and for a
    model without attention.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    if run.config.spec.reason_against(Use.ATTENTION_MAPS) is not None:
        raise no_attention_error()
    measured = {s.step: s.scores for s in run.ticker() if s.scores is not None}
    shape = [*measured.values()][-1].shape if measured else ()
    scores_by_step = {step: x_PLH for step, x_PLH in measured.items() if x_PLH.shape == shape}
    if not scores_by_step:
        raise AttnlmError(
            f"{run.name} has no snapshots with scores of its heads",
            "this version keeps them every `eval_every` steps of training, if it observes maps",
        )
    scores_PSLH = np.stack([*scores_by_step.values()], 1)
    scores = dict(zip(PATTERNS, scores_PSLH, strict=False))
    return HeadsOverTraining(run.name, [*scores_by_step], scores)
