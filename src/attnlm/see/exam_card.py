"""The card of an exam: what a model can do, task by task, beside the standard one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlm.data.dataset import Dataset
from attnlm.runs.exam_plan import SUITE, ExamPlan
from attnlm.runs.run import Run
from attnlm.see.comparison import Table
from attnlm.see.verdicts import Pair, compare_pairs, interval, interval_text

_SIDES = ("candidate", "standard")


@dataclass(frozen=True)
class TaskResult:
    """The runs of both models on a task, seed by seed, and their scores in percent.

    A score is how much of the way from guessing by the last token to the lowest possible loss a
    model has gone, as the mean over the evaluations of its training: it counts how soon a model
    learns and how well. A mean is steadier than the end, where one seed may have learnt the task
    just before, and another may do so just after.
    """

    task: str
    dataset: Dataset
    candidate: Sequence[Run]
    standard: Sequence[Run]
    failed: str | None = None
    """why it has no candidates"""
    pair: Pair | None = None
    """the judged difference of the scores; None if it failed"""

    def scores(self, side: str) -> list[float]:
        """Return the scores of the `candidate` or the `standard`, by seed."""
        return [self._score(run) for run in getattr(self, side)]

    def _score(self, run: Run) -> float:
        guess, floor = self.dataset.bigram_loss or 0.0, self.dataset.floor or 0.0
        ways = [(guess - r.val_loss) / (guess - floor) for r in run.evaluations() if r.step]
        return 100 * statistics.fmean(max(0.0, way) for way in ways)

    @property
    def verdict(self) -> str:
        """better, worse, `not shown`, `the same`, or failed."""
        return "failed" if self.pair is None else self.pair.verdict

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        scores = {side: self.scores(side) for side in _SIDES}
        means = {side: statistics.fmean(of) if of else None for side, of in scores.items()}
        judged = {name: getattr(self.pair, name, None) for name in ("difference", "interval", "p")}
        about = {"task": self.task, "verdict": self.verdict, "failed": self.failed}
        return {**about, **means, **judged, "scores": scores}


@dataclass(frozen=True)
class Exam:
    """The results of an exam."""

    plan: ExamPlan
    path: Path
    results: tuple[TaskResult, ...]

    def __repr__(self) -> str:
        return f"<Exam of {self.plan.candidate}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """Where the candidate is better, where worse, and where nobody knows."""
        words = {"better": "better at", "worse": "worse at", "not shown": "nobody knows at"}
        words |= {"the same": "the same at", "failed": "failed at"}
        tasks = {
            word: ", ".join(one.task for one in self.results if one.verdict == verdict)
            for verdict, word in words.items()
        }
        return "; ".join(f"{word} {of}" for word, of in tasks.items() if of)

    def table(self) -> Table:
        """Return the names of the columns, and a row for each task."""
        rows = []
        for one in self.results:
            row = [one.task]
            for side in _SIDES:
                scores = one.scores(side)
                row.append(f"{statistics.fmean(scores):.1f}" if scores else "failed")
                row.append(interval_text(interval(scores), ".1f") if scores else "")
            row.append(one.verdict)
            row.append("" if one.pair is None else f"{one.pair.difference:+.1f}")
            row.append("" if one.pair is None else interval_text(one.pair.interval, ".1f"))
            rows.append([*row, SUITE[one.task].asks])
        columns = ["task", "score", "interval", "standard", "its interval", "verdict"]
        return [*columns, "difference", "of 95%", "asks for"], rows

    def costs(self) -> dict[str, dict[str, float]]:
        """Return what each model costs: its most parameters, and FLOPs and seconds of training."""
        costs = {}
        for side in _SIDES:
            runs = [run for one in self.results for run in getattr(one, side)]
            each = [run.config.spec.costs(run.vocab_size).training_flops for run in runs]
            ends = [run.evaluations()[-1] for run in runs]
            costs[side] = {
                "parameters": max((run.parameters for run in runs), default=0),
                "flops": sum(n * end.tokens for n, end in zip(each, ends, strict=True)),
                "seconds": sum(end.seconds for end in ends),
            }
        return costs

    def facts(self) -> dict[str, Any]:
        """Return the card as JSON values."""
        plan = self.plan
        return {
            "candidate": plan.candidate,
            "part": plan.part or None,
            "path": str(self.path),
            "seeds": plan.seeds,
            "tasks": [one.facts() for one in self.results],
            "costs": self.costs(),
            "verdict": self.verdict,
        }


def judged(results: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """Return results with verdicts: seed by seed, with spreads that tasks share, and Holm's levels.

    Each task's differences are a group, which is compared with no difference.
    """
    differences: dict[str, dict[int, float]] = {}
    for one in results:
        if one.failed is None:
            pairs = zip(one.scores("standard"), one.scores("candidate"), strict=True)
            differences[one.task] = {seed: old - new for seed, (old, new) in enumerate(pairs)}
    none = {seed: 0.0 for of in differences.values() for seed in of}
    pairs_of = compare_pairs({**differences, "": none}, baseline="") if differences else []
    verdicts = {pair.groups[0]: pair for pair in pairs_of}
    return tuple(replace(one, pair=verdicts.get(one.task)) for one in results)
