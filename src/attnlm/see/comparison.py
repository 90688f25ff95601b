"""Groups of runs compared: tables, conclusions, what makes it unfair, JSON, curves and a page."""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import UsageError
from attnlm.base.folders import flag
from attnlm.base.formatting import duration, listed
from attnlm.base.setting_fields import fields_of
from attnlm.config.training import TrainingConfig
from attnlm.runs.ladder_plan import TOLERANCE, LadderPlan
from attnlm.runs.records import NOT_COMPARABLE
from attnlm.runs.run import Result, Run
from attnlm.see.curves import (
    Line,
    chart_data,
    colours_of,
    group_lines,
    median,
    picture,
    recent_fall,
    verdict,
)
from attnlm.see.page import render
from attnlm.see.verdicts import Pair, interval, interval_text, p_at_most

BITS = "bits_per_byte"
Table = tuple[list[str], list[list[str]]]
"""the names of columns, and rows"""
_NOTICEABLE = 0.01  # nats per token
_MEASURES = {"val_loss": "validation loss", BITS: "bits per byte", "accuracy": "accuracy"}
_IDEAS = {
    "bigram": "a table in which the last token's row holds the logits of the next",
    "average": "each token becomes the mean of itself and all tokens before it",
    "dot-product": "attention without parameters: each token reads most from those whose "
    "embeddings are like its own",
    "single-head": "one head with learned queries, keys and values",
    "multi-head": "several narrow heads in parallel, which look for several things at once",
    "wide-head": "heads as wide as the embedding, projected back to its width",
    "transformer": "blocks of attention and an MLP with residual connections, norms and rotary "
    "positions",
    "gpt2": "GPT-2's parts: layer norm, learned positions, GELU, tied embeddings",
    "llama": "Llama's parts: RMS norm, rotary positions, SwiGLU",
    "qwen3": "Qwen3's parts: Llama's, with normalised queries and keys",
}
"""What each model is, for a page that compares it with others."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds, or in what does not matter here.

    A group of a ladder is a rung.
    """

    name: str
    runs: tuple[Run, ...]
    results: tuple[Result, ...] = ()
    """the results of each run; empty if a run was never evaluated"""
    measure: str = "val_loss"
    target: float | None = None
    """a loss, in nats per token"""
    text: str | None = None
    """of a rung, how its run `shown` continues the ladder's prompt"""
    failed: str | None = None
    """of a rung, why it has no runs: training diverged, or its own code raised an error"""

    @property
    def values(self) -> list[float]:
        """The measure of each run; empty as `results` are."""
        return [getattr(result.final, self.measure) for result in self.results]

    @property
    def mean(self) -> float | None:
        """The mean of `values`."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean; None for one run."""
        return interval(self.values)

    @property
    def p(self) -> float | None:
        """The probability of such a mean, or a lower one, if the true mean were the target; None
        for one run, and without a target."""
        if self.target is None or len(self.values) < 2:
            return None
        return p_at_most(self.values, self.target)

    @property
    def reached(self) -> list[float | None]:
        """The step at which each run reached the target, by interpolation; None if it never did."""
        return [_step_at(r, self.target) for r in self.results if self.target is not None]

    @property
    def steps_to_target(self) -> list[float]:
        """The same steps; empty if a run never reached the target."""
        return [] if None in self.reached else [step for step in self.reached if step is not None]

    @property
    def result(self) -> Result:
        """The results of `shown`."""
        return median(self.results)

    @property
    def shown(self) -> Run:
        """The run with the median loss, or the lower of the two in the middle."""
        return self.runs[self.results.index(self.result) if self.results else 0]

    @property
    def idea(self) -> str:
        """A sentence on the model; "" for own code, and without runs."""
        config = self.shown.config if self.runs else None
        return "" if config is None or config.codes else _IDEAS.get(config.spec.preset or "", "")

    @property
    def verdict(self) -> str:
        """A sentence on how the training of `shown` went."""
        return verdict(self.shown, self.result)

    @property
    def flops(self) -> int:
        """The floating-point operations of `shown`: matmuls, forward and backward."""
        costs = self.shown.config.spec.costs(self.shown.vocab_size)
        return costs.training_flops * self.result.last.tokens

    @cached_property
    def about(self) -> dict[str, Any]:
        """The settings, data and origin that all its runs have in common."""
        every = [*map(_about, self.runs)]
        return {k: v for k, v in every[0].items() if _are_equal([one.get(k) for one in every])}

    def facts(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        runs = {}
        for run, result in itertools.zip_longest(self.runs, self.results):
            about = {"seed": run.config.training.seed, "parameters": run.parameters}
            if result is not None:
                about |= {**result.facts(), "accuracy": result.final.accuracy}
            runs[run.name] = about
        steps = self.steps_to_target
        return {
            **{name: getattr(self, name) for name in ("name", "failed", "text", "mean")},
            "mean_interval": self.interval,
            "flops": self.flops if self.results else None,
            "p_of_target": self.p,
            "reached": self.reached,
            "reached_mean": statistics.fmean(steps) if steps else None,
            "reached_interval": interval(steps),
            "runs": runs,
        }


def _about(run: Run) -> dict[str, Any]:
    return {
        **run.config.settings(),
        "data": None if run.imported_from else run.dataset.name,
        "train_sha256": run.dataset.train_sha256 or None,
        "val_sha256": run.dataset.val_sha256 or None,
        "tokenizer": run.tokenizer.name,
        "vocab_size": run.vocab_size,
        "parent": run.started_from or None,
        "imported_from": run.imported_from or None,
    }


@dataclass(frozen=True, repr=False)
class Comparison:
    """Groups of runs, and the comparison of each with each earlier one or with a baseline.

    `measure` is val_loss (nats per token), bits_per_byte or accuracy. `command` makes it again. A
    ladder has its `plan`, and its folder as `path`.
    """

    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    measure: str
    command: str = ""
    plan: LadderPlan | None = None
    path: Path | None = None

    def __repr__(self) -> str:
        shown = [f"{group.name} {group.mean:.4f}" for group in self.measured]
        return f"<Comparison of {self.measure}: {', '.join(shown)}>"

    @property
    def measured(self) -> list[Group]:
        """The groups whose runs have results."""
        return [group for group in self.groups if group.values]

    @cached_property
    def differences(self) -> dict[str, dict[str, Any]]:
        """The settings, data and origins in which groups differ: for each, its value in each group
        that has runs, None where it has none or several."""
        about = {group.name: group.about for group in self.groups if group.runs}
        keys = dict.fromkeys(itertools.chain(*about.values()))
        rows = {key: {name: one.get(key) for name, one in about.items()} for key in keys}
        return {key: row for key, row in rows.items() if not _are_equal([*row.values()])}

    # --- Tables and conclusions -------------------------------------------------------------------

    def difference_table(self) -> Table:
        """Return the names of the groups, and a row for each of `differences`."""
        rows = self.differences.items()
        return _table(
            [{"difference": key, **{n: _short(v) for n, v in row.items()}} for key, row in rows]
        )

    def table(self) -> Table:
        """Return the names of the columns, and a row for each group."""
        unequal = self._unequal
        rows = []
        for group in self.groups:
            row = {"group": group.name, _MEASURES[self.measure]: "failed" if group.failed else ""}
            rows.append(row)
            if group.mean is not None:
                final, last = group.result.final, group.result.last
                row |= {
                    _MEASURES[self.measure]: f"{group.mean:.4f}",
                    "interval": interval_text(group.interval),
                    "right answers": "" if final.accuracy is None else f"{final.accuracy:.1%}",
                    "bits/byte": "" if (bits := final.bits_per_byte) is None else f"{bits:.3f}",
                    "steps": f"{last.step:,}",
                    "seconds": f"{last.seconds:.1f}",
                }
            if group.runs:
                row["parameters"] = f"{group.shown.parameters:,}{unequal.get(group.name, '')}"
                row["runs"] = f"{len(group.runs)}"
            if group.target is not None:
                steps, never = group.steps_to_target, group.reached.count(None)
                row |= {
                    "p of target": "" if group.p is None else f"{group.p:.2g}",
                    "steps to it": f"{statistics.fmean(steps):,.0f}" if steps else f"{never} never",
                    "their interval": interval_text(interval(steps), ",.0f"),
                }
        return _table(rows)

    def pair_table(self) -> Table:
        """Return the names of the columns, and a row for each pair whose spread is known."""
        return _table(
            [
                {
                    "group": pair.groups[0],
                    "than": pair.groups[1],
                    "verdict": pair.verdict,
                    "difference": f"{pair.difference:+z.4f}".replace("-", "−"),
                    "interval": interval_text(pair.interval),
                    "p": f"{pair.p:.2g}",
                    "seeds needed": f"{pair.seeds_needed or ''}",
                }
                for pair in self.pairs
                if pair.p is not None
            ]
        )

    @property
    def verdict(self) -> str:
        """The conclusions in words: the best group, and how it differs from each other."""
        words = [
            f"{group.name}: the probability of such a mean at the target is {group.p:.2g}"
            for group in self.groups
            if group.p is not None
        ]
        if not (measured := self.measured):
            return "no run was evaluated"
        sign = -1 if self.measure == "accuracy" else 1
        best = min(measured, key=lambda group: sign * (group.mean or 0))
        extreme = "highest" if sign < 0 else "lowest"
        words.append(f"the {extreme} {_MEASURES[self.measure]} is {best.mean:.4f}, by {best.name}")
        of_best = [pair for pair in self.pairs if best.name in pair.groups] or self.pairs
        words += [self._conclusion(pair) for pair in of_best if pair.p is not None]
        if len(measured) > 1 and all(pair.p is None for pair in self.pairs):
            words.append("with one run of each, a difference may be chance: use 3 seeds or more")
        return "; ".join(words)

    def _conclusion(self, pair: Pair) -> str:
        group, rival = pair.groups
        if pair.verdict == "the same":
            return f"{group} is the same as {rival}, up to rounding"
        amount = f"{abs(pair.difference):.4f}"
        if pair.verdict != "not shown":
            return f"{group} is {pair.verdict} than {rival} by {amount}"
        none = f"no difference is shown between {group} and {rival}"
        if pair.seeds_needed is None:
            return f"{none}: one of {amount} would take over 100 seeds"
        seconds = 0.0
        for one in (one for one in self.measured if one.name in pair.groups):
            mean = statistics.fmean(result.last.seconds for result in one.results)
            seconds += max(0, pair.seeds_needed - len(one.runs)) * mean
        return (
            f"{none}: {pair.seeds_needed} seeds would show one of {amount}, in about "
            f"{duration(seconds, 2)} more at the speed of these runs"
        )

    # --- What makes it unfair ---------------------------------------------------------------------

    @property
    def _unequal(self) -> dict[str, str]:
        """The rungs that have not the parameters of the first although they should: ` (-12%)`."""
        counts = {group.name: group.shown.parameters for group in self.measured}
        wanted = self.plan and self.plan.equal == "parameters" and counts.get(self.plan.rungs[0])
        if not wanted:  # the first rung may have failed
            return {}
        off = {name: count / wanted - 1 for name, count in counts.items()}
        return {name: f" ({r:+.0%})" for name, r in off.items() if abs(r) > TOLERANCE}

    @property
    def warnings(self) -> list[str]:
        """Sentences on differences that make the comparison unfair."""
        return [*self._warnings()] if self.measured else []

    def _warnings(self) -> Iterator[str]:
        data = {group.name: group.about.get("train_sha256") for group in self.measured}
        if self.measure == "val_loss" and "val_sha256" in self.differences:
            yield "losses are of different validation splits: compare bits per byte, not per token"
        elif self.measure != BITS and "train_sha256" in self.differences:
            first, *others = (name for name in data)
            others = [name for name in others if data[name] != data[first]]
            yield f"trained on other data than {first}: {listed(others)}"
        for group in self.measured:
            if group.shown.leaks:
                yield f"the loss of {group.name} is {NOT_COMPARABLE}"
        own = [group.name for group in self.measured if group.shown.config.codes]
        if own and len(own) < len(self.measured):
            yield (
                f"seconds: {', '.join(own)} ran as PyTorch modules; the others have faster forms, "
                "so that a difference in time is not the cost of the idea"
            )
        is_tuned = self.plan is not None and self.plan.tune
        is_model = self.differences.keys() - fields_of(TrainingConfig).keys()
        whys = dict.fromkeys(("batch_size", "block_size"), "steps are not equally large, in tokens")
        if is_model and not is_tuned:
            whys |= dict.fromkeys(("optimizer", "learning_rate"), "not only the model differs")
        for key, why in whys.items():
            if values := self.differences.get(key):
                which = (f"{_short(value)} in {name}" for name, value in values.items())
                yield f"{why}: {key.replace('_', ' ')} is {', '.join(which)}"
        for name, off in self._unequal.items():
            yield f"parameters are not equal in all rungs: {name}{off}"
        small, large = (
            pick(self.measured, key=lambda group: group.shown.parameters) for pick in (min, max)
        )
        times = large.shown.parameters / small.shown.parameters
        if times > 2 and not self._unequal:
            yield f"{large.name} has {times:,.1f} times as many parameters as {small.name}"
        ranked = sorted(self.measured, key=lambda group: group.result.final.val_loss)
        for one, other in itertools.pairwise(ranked):
            apart = other.result.final.val_loss - one.result.final.val_loss
            fall = max(recent_fall(group.result.records) for group in (one, other))
            if fall > max(_NOTICEABLE, apart):
                yield (
                    f"too few steps to rank {one.name} and {other.name}: they are {apart:.3f} "
                    f"apart, and a loss fell by {fall:.3f} over the last fifth of training"
                )

    @property
    def notes(self) -> list[str]:
        """Sentences on how the runs were made and compared."""
        return [*self._notes()]

    def _notes(self) -> Iterator[str]:
        runs = {group.name: group.runs for group in self.groups}
        if self.measure == BITS:
            yield "the tokenizers differ: bits per byte of the same text are compared"
        every = itertools.chain(*runs.values())
        is_by_loss = any(run.config.training.best_by != "accuracy" for run in every)
        if self.measure == "accuracy" and is_by_loss:
            yield (
                "accuracy is that of the checkpoint with the lowest loss: `best_by` accuracy keeps "
                "the one with the most right answers"
            )
        for both in (pair.groups for pair in self.pairs if not pair.paired):
            group, rival = ({run.config.training.seed for run in runs[name]} for name in both)
            what = "batches" if group == rival else "seeds"
            yield f"{' and '.join(both)} are compared by Welch's test: the {what} differ"
        for part in dict.fromkeys(group.result.part for group in self.measured):
            if part:
                yield f"losses were measured on {part}"
        if any(pair.interval for pair in self.pairs):
            yield (
                "equal groups are called different in at most 5 of 100 comparisons: intervals are "
                "95% by Student's t, and wider by Holm's method for several pairs"
            )
        if self.plan is not None:
            yield from self.plan.notes()

    # --- Files ------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        names = ("measure", "differences", "verdict", "warnings", "notes")
        return {
            **{name: getattr(self, name) for name in names},
            "groups": [group.facts() for group in self.groups],
            "comparisons": [asdict(pair) for pair in self.pairs],
            "ladder": self.plan and {"path": str(self.path), **asdict(self.plan)},
        }

    def save(self, path: str | Path) -> Path:
        """Write it as a file, and return its path.

        The name ends with .html (a page that works offline), .csv (the measure of each run), .tex
        (the table, for the LaTeX package booktabs), or .png, .svg or .pdf (the curves).
        """
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind == "html":
            content = self._page()
        elif kind == "csv":
            content = self._csv()
        elif kind == "tex":
            content = _latex(*(self.pair_table() if self.pair_table()[1] else self.table()))
        elif kind in ("png", "svg", "pdf"):
            content = picture(self._curves("tokens"), self.references, "tokens", format=kind)
        else:
            hint = "end it with .html, .csv, .tex, .png, .svg or .pdf"
            raise UsageError(f"{path} has no known kind of file", hint)
        files.write_bytes(path, content)
        return path

    def _csv(self) -> bytes:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("group", "run", "seed", self.measure))
        for group in self.groups:
            for run, value in itertools.zip_longest(group.runs, group.values):
                writer.writerow((group.name, run.name, run.config.training.seed, value))
        return file.getvalue().encode()

    def _curves(self, x: str) -> list[Line]:
        """Return the curve of each group by `x`, which is tokens or seconds."""
        return group_lines({group.name: group.results for group in self.groups}, x)

    @property
    def references(self) -> dict[str, float]:
        """Return the known losses, if the measure is a loss and all groups have the same."""
        if self.measure != "val_loss" or "val_sha256" in self.differences:
            return {}
        return next(group for group in self.groups if group.runs).shown.references()

    def _page(self) -> bytes:
        from attnlm.see.model_page import first_text, models_to_try

        references = self.references
        runs = {group.name: group.shown for group in self.groups if group.runs}
        models = models_to_try(runs)
        prompt = (self.plan and self.plan.prompt) or first_text([*runs.values()])
        axes = ("tokens", "seconds")
        charts = [chart_data(self._curves(x), references, x) for x in axes]
        return render(
            "comparison.html",
            script="comparison_page.js",
            data={"models": models, "prompt": prompt, "charts": charts},
            found=self,
            heading=f"{listed([*runs])} compared",
            captions=[f"Validation loss in nats per token by {x}" for x in axes],
            colours=colours_of(group.name for group in self.groups),
            references=references,
            notes=[re.sub(r"`(\w+)`", lambda word: flag(word[1]), one) for one in self.notes],
            train_sha256=next(iter(runs.values())).dataset.train_sha256,
            version=attnlm.__version__,
        )


def _step_at(result: Result, target: float) -> float | None:
    """Return the step at which a run's loss was first at most `target`, between evaluations."""
    before = None
    for record in result.records:
        if record.val_loss <= target:
            if before is None:
                return float(record.step)
            share = (before.val_loss - target) / (before.val_loss - record.val_loss)
            return before.step + share * (record.step - before.step)
        before = record
    return None


def _are_equal(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)


def _short(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else f"{value}"[:40]


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the names of the columns in which any row has a text, and the rows."""
    columns = [
        name for name in dict.fromkeys(itertools.chain(*rows)) if any(row.get(name) for row in rows)
    ]
    return columns, [[row.get(name, "") for name in columns] for row in rows]


def _latex(header: list[str], rows: list[list[str]]) -> bytes:
    lines = [" & ".join(map(_in_latex, row)) + r" \\" for row in (header, *rows)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
    parts = [begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*parts, r"\end{tabular}", ""]).encode()


def _in_latex(text: str) -> str:
    escaped = re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/"))
    return re.sub(r"−|(?<![\w.])-(?=\d)", "$-$", escaped)
