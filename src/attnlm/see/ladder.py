"""The rungs of a ladder side by side: losses, gains, and what is not like for like."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlm.runs.ladder_plan import Plan
from attnlm.runs.run import Run
from attnlm.see.curves import best_record, verdict


@dataclass(frozen=True)
class Rung:
    """A trained rung: its run, the lines of its metrics, and what was sampled from it."""

    model: str
    """as the ladder names it: a preset, or a variant of one"""
    run: Run
    records: Sequence[Mapping[str, Any]]
    text: str
    whole: Mapping[str, Any] = field(default_factory=dict)
    """what was measured of the best checkpoint on the whole split, if it was of every rung"""

    @property
    def best(self) -> Mapping[str, Any]:
        """The record of the best evaluation: that of the checkpoint which is sampled from."""
        return {**best_record(self.records), **self.whole}

    @property
    def last(self) -> Mapping[str, Any]:
        return self.records[-1]

    @property
    def verdict(self) -> str:
        """How its training went, in words."""
        return verdict(self.records, self.run.dataset)


@dataclass(frozen=True)
class Ladder:
    """The rungs of a ladder, trained; `path` is its own folder, beside the runs' folders."""

    path: Path
    plan: Plan
    rungs: tuple[Rung, ...]

    @property
    def measured_on(self) -> str:
        """What part of the validation split the losses are of; empty for all of it."""
        first = self.rungs[0]
        return "" if first.whole else first.run.evaluated_part

    @property
    def labels(self) -> dict[str, str]:
        """Short names of the rungs: `…positions=none` where all variants are of one model."""
        models = [rung.model for rung in self.rungs]
        changed = {model.partition(":")[0] for model in models if ":" in model}
        shared = f"{changed.pop()}:" if len(changed) == 1 else ":"
        return {m: f"…{m.removeprefix(shared)}" if m.startswith(shared) else m for m in models}

    @property
    def gains(self) -> list[float | None]:
        """By how much each rung's loss is below the lowest of those before; None for the first."""
        losses = [float(rung.best["val_loss"]) for rung in self.rungs]
        lowest = itertools.accumulate(losses, min)
        return [None, *(best - loss for best, loss in zip(lowest, losses[1:], strict=False))]

    @property
    def warnings(self) -> list[str]:
        """Wherever the comparison is not like for like."""
        return list(_warnings(self))


def _warnings(ladder: Ladder) -> Iterator[str]:
    configs = {rung.model: rung.run.config for rung in ladder.rungs}
    training = {model: config.training for model, config in configs.items()}
    tuned = {m: f"{t.optimizer} {t.learning_rate:g}" for m, t in training.items()}
    if differ := _differing(tuned):
        yield f"optimizer and learning rate are the defaults of each rung: {differ}"
    widths = {m: f"{c.model.embed_dim}" for m, c in configs.items() if c.model.embed_dim}
    if differ := _differing(widths):
        yield f"embeddings are not equally wide: {differ}"
    machines = {
        m: f"{t.device} {t.dtype}, {t.threads} thread{'s' if t.threads != 1 else ''}"
        for m, t in training.items()
    }
    if differ := _differing(machines):
        yield f"seconds are only partly comparable: the rungs ran on different settings: {differ}"
    for rung in ladder.rungs:
        step, best = rung.last["step"], rung.best["step"]
        if step != ladder.plan.steps:
            yield f"{rung.model} made {step:,} steps, not {ladder.plan.steps or 0:,}"
        if rung.last["val_loss"] > best_record(rung.records)["val_loss"]:
            yield f"{rung.model} is shown at step {best:,}: its loss rose after that"
    falling = [r.model for r in ladder.rungs if r.verdict.startswith("loss still falling")]
    if falling:
        yield f"too few steps to compare final losses: still falling for {', '.join(falling)}"


def _differing(facts: Mapping[str, str]) -> str:
    """Which rungs have which fact; empty where all have the same."""
    if len(set(facts.values())) < 2:
        return ""
    by_fact: dict[str, list[str]] = {}
    for model, fact in facts.items():
        by_fact.setdefault(fact, []).append(model)
    return "; ".join(f"{', '.join(models)} {fact}" for fact, models in by_fact.items())
