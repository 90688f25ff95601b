"""What a comparison of groups of runs has found, as tables, JSON, a page and curves."""

from __future__ import annotations

import csv
import io
import itertools
import re
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import attnlm
from attnlm.base.setting_fields import Setting
from attnlm.runs.run import Run
from attnlm.see.curves import Line, chart_data, colours_of, panels_picture, seeds_line
from attnlm.see.page import render
from attnlm.see.verdicts import Pair, interval, interval_text

BITS = "bits_per_byte"


@dataclass(frozen=True)
class Target:
    """How the losses of a group compare with a target."""

    p: float | None
    """the probability of such a mean, or a lower one, if the true mean were the target; None for
    one run"""
    steps: tuple[float | None, ...]
    """the step at which each run reached the target, by interpolation; None if it never did"""

    @property
    def mean_steps(self) -> float | None:
        """The mean of `steps`, or None if a run never reached the target."""
        reached = [step for step in self.steps if step is not None]
        return statistics.fmean(reached) if len(reached) == len(self.steps) else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of `mean_steps`; None for one run."""
        reached = [step for step in self.steps if step is not None]
        return interval(reached) if len(reached) == len(self.steps) > 1 else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds, or in what does not matter here."""

    name: str
    runs: tuple[Run, ...]
    values: tuple[float, ...]
    """the measure of each run; empty if there is one run in each group, which may have none"""
    settings: Mapping[str, Setting]
    """the settings that all its runs have in common"""
    target: Target | None = None

    @property
    def mean(self) -> float | None:
        """The mean of `values`."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean; None for one run."""
        return interval(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Groups of runs, and the comparison of each with each earlier one or with a baseline.

    `measure` is val_loss (nats per token), bits_per_byte or accuracy. `settings` has the settings
    in which groups differ: for each, its value in each group, None where it has none or several.
    `data` has the same for their data, and `results` the results if each group is one run. `notes`
    say what one has to know to read it.
    """

    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    measure: str
    settings: Mapping[str, tuple[Any, ...]]
    data: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, tuple[Any, ...]]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = [f"{p.rung} than {p.rival}: {p.verdict}" for p in self.pairs]
        return f"<Comparison {'; '.join(shown or [group.name for group in self.groups])}>"

    def group_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and a row for each group."""
        header = ["group", self.measure.replace("_", " "), "interval", "runs"]
        header += ["p of target", "steps to it", "their interval"]
        rows = []
        for group in self.groups:
            mean = "" if group.mean is None else f"{group.mean:.4f}"
            row = [group.name, mean, interval_text(group.interval), str(len(group.runs))]
            reached = ["", "", ""]
            if (target := group.target) is not None:
                steps = f"{target.steps.count(None)} never"
                if target.mean_steps is not None:
                    steps = f"{target.mean_steps:,.0f}"
                p = "" if target.p is None else f"{target.p:.2g}"
                reached = [p, steps, interval_text(target.interval, ",.0f")]
            rows.append(row + reached)
        shown = 7 if any(group.target for group in self.groups) else 4
        return header[:shown], [row[:shown] for row in rows]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and a row for each pair."""
        rows = [
            [
                pair.rung,
                pair.rival,
                pair.verdict,
                f"{pair.difference:+z.4f}",
                interval_text(pair.interval),
                "" if pair.p is None else f"{pair.p:.2g}",
                f"{pair.seeds_needed or ''}",
            ]
            for pair in self.pairs
        ]
        columns = ["group", "than", "verdict", "difference", "interval", "p", "seeds needed"]
        return columns, rows

    @property
    def verdict(self) -> str:
        """A sentence for each pair with a verdict, and what would show the others."""
        words = [
            f"{group.name}: the probability of such a mean at the target is {group.target.p:.2g}"
            for group in self.groups
            if group.target is not None and group.target.p is not None
        ]
        if not words and all(pair.p is None for pair in self.pairs):
            return "one run in each group gives no verdict: the difference may be chance"
        for pair in self.pairs:
            both = f"{pair.rung} and {pair.rival}"
            if pair.p is None:
                words.append(f"{both}: the spread is unknown")
            elif pair.verdict == "not shown":
                seeds = "over 100" if pair.seeds_needed is None else f"{pair.seeds_needed}"
                words.append(f"{both}: no difference is shown; {seeds} seeds would show this one")
            else:
                verb = "the same as" if pair.verdict == "the same" else f"{pair.verdict} than"
                words.append(f"{pair.rung} is {verb} {pair.rival}")
        return "; ".join(words)

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        names = [group.name for group in self.groups]
        facts: dict[str, Any] = {"measure": self.measure, "groups": []}
        for group in self.groups:
            runs = {
                run.name: {"seed": run.config.training.seed, self.measure: value}
                for run, value in itertools.zip_longest(group.runs, group.values)
            }
            about: dict[str, Any] = {
                "name": group.name,
                "mean": group.mean,
                "interval": group.interval,
            }
            if (target := group.target) is not None:
                steps = {"mean_steps": target.mean_steps, "interval": target.interval}
                about["target"] = asdict(target) | steps
            facts["groups"].append({**about, "runs": runs})
        for part in ("settings", "data", "results"):
            values = getattr(self, part).items()
            facts[part] = {key: dict(zip(names, row, strict=True)) for key, row in values}
        facts["comparisons"] = [
            {"groups": (facts.pop("rung"), facts.pop("rival")), **facts}
            for facts in map(asdict, self.pairs)
        ]
        return facts | {"notes": self.notes}

    def written(self, format: str) -> bytes:
        """Return the comparison as a file: csv, tex, html, or the curves as png, svg or pdf."""
        return {"csv": self._csv, "tex": self._latex, "html": self._page}.get(
            format, lambda: panels_picture(self._panels(), self._references(), format=format)
        )()

    def _csv(self) -> bytes:
        """Return the measure of each run: group, run, seed, value."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("group", "run", "seed", self.measure))
        for group in self.groups:
            for run, value in itertools.zip_longest(group.runs, group.values):
                writer.writerow((group.name, run.name, run.config.training.seed, value))
        return file.getvalue().encode()

    def _latex(self) -> bytes:
        """Return the table of pairs, or else of groups, for the package booktabs."""
        header, rows = self.table() if self.pairs else self.group_table()
        lines = [" & ".join(_in_latex(cell) for cell in row) + r" \\" for row in (header, *rows)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
        parts = [begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join([*parts, r"\end{tabular}", ""]).encode()

    def _panels(self) -> dict[str, list[Line]]:
        colours = colours_of(group.name for group in self.groups)
        panels: dict[str, list[Line]] = {"tokens": []}
        for group in self.groups:
            results = [result for run in group.runs if (result := run.result()) is not None]
            if results:
                line = seeds_line(group.name, results, "tokens", colours[group.name])
                panels["tokens"].append(line)
        return panels

    def _references(self) -> dict[str, float]:
        """Return the known losses, if all groups have the same."""
        return self.groups[0].runs[0].references() if self.measure == "val_loss" else {}

    def _page(self) -> bytes:
        from attnlm.see.model_page import first_text, models_to_try

        panels = self._panels()
        runs = {group.name: group.runs[0] for group in self.groups}
        models = models_to_try(runs)
        of = " of each tokenizer" if self.measure == BITS else ""
        caption = f"Validation loss in nats per token{of}, by tokens"
        prompt = first_text([*runs.values()])
        charts = [chart_data(panels["tokens"], self._references(), "tokens")]
        return render(
            "compare.html",
            script="ladder_page.js",
            data={"models": models, "prompt": prompt, "charts": charts},
            heading=f"{' and '.join(runs)} compared",
            verdict=self.verdict,
            models=models,
            train_sha256=self.groups[0].runs[0].dataset.train_sha256,
            again=shlex.join(["attnlm", "compare", *runs]),
            version=attnlm.__version__,
            caption=caption,
            colours={line.label: line.colour for line in panels["tokens"]},
            references=self._references(),
            groups=self.group_table(),
            pairs=self.table(),
            settings=self.settings,
            names=[*runs],
            notes=self.notes,
        )


def _in_latex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/")).replace("−", "$-$")
