"""The card of an exam: what a model can do, task by task, beside the standard one."""

from __future__ import annotations

import contextlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import UsageError
from attnlm.base.formatting import quantity
from attnlm.data.dataset import Dataset
from attnlm.runs.exam_plan import STANDARD, SUITE, TEXT, ExamPlan
from attnlm.runs.ladder_plan import TOLERANCE
from attnlm.runs.run import Run
from attnlm.see.attend import CAUTION, attend, packed_attention
from attnlm.see.comparison import Table
from attnlm.see.page import render
from attnlm.see.verdicts import Pair, compare_by_task, interval, interval_text

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
    sample: Mapping[str, str] = field(default_factory=dict)
    """a `question`, the `right` answer, and those of the `candidate` and the `standard`"""

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

    @property
    def difference(self) -> str:
        """The difference of the mean scores, in points."""
        return "" if self.pair is None else f"{self.pair.difference:+z.1f}".replace("-", "−")

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        scores = {side: self.scores(side) for side in _SIDES}
        means = {side: statistics.fmean(of) if of else None for side, of in scores.items()}
        judged = {name: getattr(self.pair, name, None) for name in ("difference", "interval", "p")}
        about = {"task": self.task, "verdict": self.verdict, "failed": self.failed}
        losses = {
            side: [run.evaluations()[-1].val_loss for run in getattr(self, side)] for side in _SIDES
        }
        lists = {"scores": scores, "losses": losses, "sample": self.sample or None}
        return {**about, **means, **judged, **lists}


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
        """Where the candidate is better, where worse, and where no difference is shown."""
        words = {"better": "better at", "worse": "worse at", "not shown": "not shown at"}
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
            row.append(one.difference)
            row.append("" if one.pair is None else interval_text(one.pair.interval, ".1f"))
            rows.append([*row, SUITE[one.task].asks])
        columns = ["task", "score", "interval", "standard", "its interval", "verdict"]
        return [*columns, "difference", "of 95%", "asks for"], rows

    def costs(self) -> dict[str, dict[str, Any]]:
        """Return what each model costs: the parameters of its largest, FLOPs and seconds of all its
        trainings, and its mean loss on the text, in nats per token; None without the text."""
        costs = {}
        for side in _SIDES:
            runs = [(one.task, run) for one in self.results for run in getattr(one, side)]
            ends = [(task, run.evaluations()[-1]) for task, run in runs]
            each = [run.config.spec.costs(run.vocab_size).training_flops for _, run in runs]
            of_text = [end.val_loss for task, end in ends if task == TEXT]
            costs[side] = {
                "parameters": max((run.parameters for _, run in runs), default=0),
                "flops": sum(n * end.tokens for n, (_, end) in zip(each, ends, strict=True)),
                "seconds": sum(end.seconds for _, end in ends),
                "loss": statistics.fmean(of_text) if of_text else None,
            }
        return costs

    def cost_table(self) -> Table:
        """Return the names of the columns, and a row for each model."""
        rows = []
        for side, cost in self.costs().items():
            name = self.plan.candidate if side == "candidate" else "the standard"
            loss = "" if cost["loss"] is None else f"{cost['loss']:.4f}"
            flops, seconds = quantity(cost["flops"], "FLOP"), f"{cost['seconds']:.0f}"
            rows.append([name, f"{cost['parameters']:,}", flops, seconds, loss])
        columns = ["model", "parameters", "FLOPs", "seconds", f"loss on {TEXT}"]
        if not any(row[-1] for row in rows):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        return columns, rows

    @property
    def notes(self) -> list[str]:
        """Sentences on what makes the comparison unfair."""
        notes = []
        sides = [cost["parameters"] for cost in self.costs().values()]
        if all(sides) and abs(sides[0] / sides[1] - 1) > TOLERANCE:
            times = f"{sides[0] / sides[1]:.2f} times as many parameters as the standard"
            notes.append(f"{self.plan.candidate} has {times}")
        if self.plan.part:
            notes.append(
                "own code runs as PyTorch modules, and the standard in faster forms, so that a "
                "difference in seconds is not the cost of the idea"
            )
        return notes

    @property
    def command(self) -> str:
        """The command that takes this exam."""
        plan = self.plan
        words = ["attnlm", "exam", plan.candidate]
        parts = ("part",) if ":" in plan.candidate else ()  # that of a head is known
        for name in (*parts, "seeds", "seed", "steps"):
            value = getattr(plan, name)
            if value not in ("", None, getattr(STANDARD, name)):
                words += [f"--{name}", str(value)]
        if plan.tasks != tuple(SUITE):
            words += ["--tasks", ",".join(plan.tasks)]
        return shlex.join(words)

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
            "longest_context": self.longest_context,
            "verdict": self.verdict,
            "notes": self.notes,
        }

    @property
    def longest_context(self) -> int:
        """The tokens of the longest windows that the models were trained on."""
        return max(run.config.spec.block_size for one in self.results for run in one.standard)

    def save(self, path: str | Path) -> Path:
        """Write the card as a page that works offline (.html), and return its path."""
        if Path(path).suffix.lower() != ".html":
            raise UsageError(f"{path} has no known kind of file", "end it with .html")
        attention = None
        shown = next((one for one in self.results if one.candidate and one.sample), None)
        if shown is not None and shown.dataset.examples is not None:
            end = shown.dataset.examples.question_end
            text = shown.sample["question"] + end + shown.sample["right"]
            with contextlib.suppress(Exception):  # no attention, or own code fails in a new form
                attention = attend(text, shown.candidate[0])
        page = render(
            "exam.html",
            script="exam_page.js",
            data={"attention": attention and packed_attention(attention)},
            card=self,
            shown=shown,
            suite=SUITE,
            standard=STANDARD.model(self.plan.tasks[0]),
            mean=statistics.fmean,
            interval=interval,
            caution=CAUTION,
            version=attnlm.__version__,
        )
        files.write_bytes(Path(path), page)
        return Path(path)


def judged(results: Sequence[TaskResult]) -> tuple[TaskResult, ...]:
    """Return results with verdicts, seed by seed."""
    scores = {
        one.task: (one.scores("candidate"), one.scores("standard"))
        for one in results
        if one.failed is None
    }
    pairs = {pair.groups[0]: pair for pair in compare_by_task(scores)}
    return tuple(replace(one, pair=pairs.get(one.task)) for one in results)
