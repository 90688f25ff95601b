"""Compare the rungs of a ladder: losses, gains and caveats.

A ladder trains several models on the same batches. Each model is a rung, with a run for each seed.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import attnlm
from attnlm.base import files
from attnlm.base.folders import flag
from attnlm.config.variants import split_variant, variant
from attnlm.model.own_specs import WIDTHS, size_settings
from attnlm.runs.ladder_plan import TOLERANCE, LadderPlan
from attnlm.runs.run import Result, Run
from attnlm.see.curves import (
    FEW_STEPS,
    Line,
    chart_data,
    colours_of,
    median,
    panels_picture,
    recent_fall,
    run_verdict,
    seeds_line,
)
from attnlm.see.model_page import first_text, models_to_try
from attnlm.see.page import render
from attnlm.see.reproduce import ladder_command
from attnlm.see.verdicts import Pair, compare_pairs, interval, interval_text

NOTICEABLE = 0.01  # nats per token


@dataclass(frozen=True)
class Rung:
    """A trained rung, and a text sampled from the best checkpoint of its run."""

    model: str
    """the rung's name: a model, or a variant such as `transformer:positions=none`"""
    run: Run
    """the run with the median loss of all seeds, or the lower of the two in the middle"""
    text: str
    results: Sequence[Result]
    """the results of each seed's run, by seed; `whole` is empty in all or in none"""

    @property
    def result(self) -> Result:
        """The results of `run`."""
        return median(self.results, key=lambda result: result.final.val_loss)

    @property
    def losses(self) -> list[float]:
        """The loss of each seed's best checkpoint, ascending."""
        return sorted(result.final.val_loss for result in self.results)

    @property
    def mean(self) -> float:
        """The mean of `losses`."""
        return statistics.fmean(self.losses)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval for the mean loss of all seeds that there are; None for one seed."""
        return interval(self.losses) if len(self.losses) > 1 else None

    @property
    def loss(self) -> float:
        """The loss of `run`, in nats per token."""
        return self.result.final.val_loss

    @property
    def flops(self) -> int:
        """The floating-point operations of `run`: matmuls, forward and backward."""
        per_token = self.run.config.spec.costs(self.run.vocab_size).training_flops
        return per_token * self.result.last.tokens

    @property
    def verdict(self) -> str:
        """A sentence on how the training went."""
        return run_verdict(self.run, self.result)


_QUANTITIES: Mapping[str, tuple[str, Callable[[Rung], float]]] = {
    "tokens": ("tokens", lambda rung: 1),  # other warnings are about tokens
    "parameters": ("parameters", lambda rung: rung.run.parameters),
    "flops": ("FLOPs", lambda rung: rung.flops),
    "time": ("seconds", lambda rung: rung.result.last.seconds),
}
"""For each value of `equal`, what it counts, and the number of it in a rung."""
_SENTENCES = {
    "tokens": "all rungs make the same steps: `equal` can hold parameters, flops or time instead",
    "parameters": "the width of each rung gives it about as many parameters as {}",
    "flops": "each rung makes the steps that need as many FLOPs, forward and backward, as {}",
    "time": "all runs have the same time, and each makes the steps that fit",
}


# For each rung: what it is, why it helps, and why it may not. A rung without an entry is named by
# its model, and its gain has no reason.
_IDEAS = {
    "bigram": (
        "A table in which the last token's row holds the logits of the next",
        "one token already says much about the next",
        "it sees nothing but the last token",
    ),
    "average": (
        "Each token becomes the mean of itself and all tokens before it",
        "it sees more than one token",
        "the mean does not say which token came last",
    ),
    "dot-product": (
        "Attention without parameters: each token reads most from those whose embeddings are "
        "like its own",
        "it tells the tokens of the past apart",
        "nothing in it learns what to look for",
    ),
    "single-head": (
        "One head with learned queries, keys and values",
        "it learns which earlier tokens to read, and what to take from them",
        "it looks for one thing at a time",
    ),
    "multi-head": (
        "Several narrow heads in parallel",
        "they look for several things at once",
        "each head is narrow",
    ),
    "wide-head": (
        "Heads as wide as the embedding, projected back to its width",
        "each head can carry more",
        "it has more parameters to learn, and narrow heads are often wide enough",
    ),
    "transformer": (
        "Blocks of attention and an MLP with residual connections, norms and rotary positions",
        "later heads look for what earlier ones found, and each MLP computes with it",
        "more parameters take more steps to learn",
    ),
}
_SHAPES = {
    "gpt2": "GPT-2: layer norm, learned positions, GELU, tied embeddings",
    "llama": "Llama: RMS norm, rotary positions, SwiGLU",
    "qwen3": "Qwen3: Llama's parts, with normalised queries and keys",
}
_IDEAS |= {
    model: (f"A transformer in the shape of {shape}", *_IDEAS["transformer"][1:])
    for model, shape in _SHAPES.items()
}


@dataclass(frozen=True)
class Gain:
    """The comparison of a rung with its rival, the best rung before it."""

    rival: Rung
    nats: float
    """the rival's loss minus the rung's loss, in nats per token"""


@dataclass(frozen=True, repr=False)
class Ladder:
    """The trained rungs of a ladder; its folder `path` is next to the folders of the runs."""

    path: Path
    plan: LadderPlan
    """the resolved settings of the ladder"""
    rungs: tuple[Rung, ...]

    def __repr__(self) -> str:
        losses = ", ".join(f"{rung.model} {rung.loss:.4f}" for rung in self.rungs)
        return f"<Ladder {self.path.name!r}: {losses} nats per token>"

    @property
    def labels(self) -> dict[str, str]:
        """Short labels, keyed by rung. If only one model has variants, their labels omit its name:
        `…positions=none`."""
        models = [*(rung.model for rung in self.rungs), *self.plan.failed]
        changed = {model.partition(":")[0] for model in models if ":" in model}
        shared = f"{changed.pop()}:" if len(changed) == 1 else ":"
        return {m: f"…{m.removeprefix(shared)}" if m.startswith(shared) else m for m in models}

    @property
    def gains(self) -> list[Gain | None]:
        """The gain of each rung; None for the first."""
        gains: list[Gain | None] = [None]
        best = self.rungs[0]
        for rung in self.rungs[1:]:
            gains.append(Gain(best, best.loss - rung.loss))
            best = rung if rung.loss < best.loss else best
        return gains

    @property
    def pairs(self) -> list[Pair]:
        """The comparison of each rung with each earlier one over the same seeds."""
        return compare_pairs(
            {r.model: dict(enumerate(x.final.val_loss for x in r.results)) for r in self.rungs}
        )

    def verdicts(self) -> tuple[list[str], list[list[str]]]:
        """Return the column names, and rows: each rung and the rung before it or the best one."""
        before = {(b.model, a.model) for a, b in itertools.pairwise(self.rungs)}
        best = min(self.rungs, key=lambda rung: rung.loss).model
        rows = [
            [
                self.labels[pair.rung],
                self.labels[pair.rival],
                pair.verdict,
                f"{pair.difference:+z.4f}",
                interval_text(pair.interval),
                f"{pair.seeds_needed or ''}",
            ]
            for pair in self.pairs
            if pair.interval
            and ((pair.rung, pair.rival) in before or best in (pair.rung, pair.rival))
        ]
        return ["rung", "than", "verdict", "difference", "interval", "seeds needed"], rows

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the column names, and a row for each rung; rungs that failed come last."""
        seeds = ["lowest to highest"] if self.plan.seeds > 1 else []
        steps = ["steps"] if self.plan.equal in ("flops", "time") else []
        deviations = self.unequal if self.plan.equal == "parameters" else {}
        right = ["right answers"] if self.rungs[0].result.final.accuracy is not None else []
        header = ["validation loss", *seeds, *right, "gain", "bits per byte", "parameters"]
        rows = [
            [
                self.labels[rung.model],
                f"{rung.loss:.4f}",
                *(f"{min(rung.losses):.4f}–{max(rung.losses):.4f}" for _ in seeds),
                *(f"{rung.result.final.accuracy or 0:.1%}" for _ in right),
                "–" if gain is None else f"{gain.nats:+z.4f}",
                "–" if (bits := rung.result.final.bits_per_byte) is None else f"{bits:.3f}",
                f"{rung.run.parameters:,}{deviations.get(rung.model, '')}",
                *(f"{rung.result.last.step:,}" for _ in steps),
                f"{rung.result.last.seconds:.1f}",
            ]
            for rung, gain in zip(self.rungs, self.gains, strict=True)
        ]
        header = ["rung", *header, *steps, "seconds"]
        failed = [
            [self.labels[rung], "failed", *[""] * len(header[2:])] for rung in self.plan.failed
        ]
        return header, rows + failed

    @property
    def verdict(self) -> str:
        """A sentence on the best rung and the second one."""
        best, *others = sorted(self.rungs, key=lambda rung: rung.loss)
        ranking = f"the lowest loss is {best.loss:.4f} nats per token, by {best.model}"
        if not others:
            return ranking
        second = others[0]
        names = {best.model, second.model}
        pair = next(pair for pair in self.pairs if {pair.rung, pair.rival} == names)
        if pair.verdict == "the same":
            return f"{ranking}, and {second.model} has the same"
        ranking += f"; the second, {second.model}, has {second.loss - best.loss:.4f} more"
        if self.plan.seeds == 1:
            return f"{ranking}; with one seed, the difference may be chance"
        show = "do not show" if pair.verdict == "not shown" else "show"
        return f"{ranking}; {self.plan.seeds} seeds {show} that they differ"

    @property
    def reference(self) -> str:
        """The rung whose parameters, operations or time the others have: the first that has any."""
        count = _QUANTITIES[self.plan.equal][1]
        return next((rung for rung in self.rungs if count(rung)), self.rungs[0]).model

    @property
    def unequal(self) -> dict[str, str]:
        """The rungs that differ by over 5% in what `equal` names, and by how much: ` (-12%)`."""
        counts = {rung.model: _QUANTITIES[self.plan.equal][1](rung) for rung in self.rungs}
        ratios = {model: n / (counts[self.reference] or 1) - 1 for model, n in counts.items()}
        return {m: f" ({ratio:+.0%})" for m, ratio in ratios.items() if abs(ratio) > TOLERANCE}

    @property
    def certainty(self) -> str:
        """A sentence on what the number of seeds can tell."""
        if self.plan.seeds == 1:
            return "with one seed the spread is unknown, and a gain may be chance: use 3 or more"
        if not self.pairs:
            rung = self.rungs[0]
            return (
                f"the mean of {self.plan.seeds} seeds is {rung.mean:.4f}; its 95% interval, by "
                f"Student's t, is {interval_text(rung.interval)}"
            )
        return (
            "a ladder of equal models claims a difference, better or worse, in at most 5 of 100 "
            f"cases: an interval is 95% by Student's t over the differences of {self.plan.seeds} "
            f"seeds, and wider by Holm's method for several pairs, here {len(self.pairs)}"
        )

    @property
    def equality(self) -> str:
        """A sentence on what is equal in all rungs."""
        sentence = _SENTENCES[self.plan.equal].format(self.reference)
        return f"{sentence} ({self.plan.adaptation})" if self.plan.adaptation else sentence

    @property
    def tuning(self) -> str:
        """A sentence on the settings that each rung has for itself."""
        if self.plan.tune is None:
            return (
                "each rung has its default learning rate, and may prefer another: `tune` "
                "learning_rate finds one for each"
            )
        tuned = dict.fromkeys(t.rung for t in self.plan.trials if t.loss is not None)
        chosen = (f"{rung} {self.plan.settings(rung, 0)[self.plan.tune]:g}" for rung in tuned)
        return (
            f"each rung has its best {self.plan.tune} of five (1/4 to 4 times its default), each "
            "tried for a fifth of the steps, or of the time of a seed, without the last tenth of "
            f"the training split, which measures the loss: {', '.join(chosen)}"
        )

    @property
    def warnings(self) -> list[str]:
        """Sentences on differences that make the comparison unfair."""
        return [*_setting_warnings(self), *_size_warnings(self), *_step_warnings(self)]

    @property
    def explained(self) -> list[tuple[str, str]]:
        """Each rung's name and sentences: what the rung adds, its gain over the best rung before
        it, and a reason for the gain; for a variant of a model, the change and the gain."""
        pairs = {(pair.rung, pair.rival): pair for pair in self.pairs}
        sentences = []
        for rung, gain in zip(self.rungs, self.gains, strict=True):
            model, *changes = split_variant(rung.model)
            pairs_of = (change.partition("=") for change in changes)
            changed = " and ".join(f"{key.replace('_', ' ')} {value}" for key, _, value in pairs_of)
            unexplained = (f"{model} with {changed}" if changed else f"The model {model}", "", "")
            idea, why, why_not = unexplained if changed else _IDEAS.get(model, unexplained)
            compared = "The others are compared with it"
            if gain is not None:
                pair = pairs[rung.model, gain.rival.model]
                is_close = pair.interval is None and abs(gain.nats) <= NOTICEABLE
                compared = f"As good as {pair.rival} after these steps"
                if not is_close or pair.verdict == "the same":
                    compared = _comparison(pair, why, why_not)
            sentences.append((rung.model, f"{idea}. {compared}."))
        return sentences

    def curves(self, x: str) -> list[Line]:
        """Return the curve of each rung by `x`, which is tokens or seconds."""
        colours = colours_of(rung.model for rung in self.rungs)
        return [
            seeds_line(self.labels[rung.model], rung.results, x, colours[rung.model])
            for rung in self.rungs
        ]

    def write_page(self) -> Path:
        """Write curves.png and index.html to the ladder's folder; return the path of index.html.

        The page works offline.
        """
        panels = {x: self.curves(x) for x in ("tokens", "seconds")}
        references = self.rungs[-1].run.references()
        files.write_bytes(self.path / "curves.png", panels_picture(panels, references))
        charts = {f"Validation loss by {x}": chart_data(panels[x], references, x) for x in panels}
        colours = {line.label: line.colour for line in panels["tokens"]}
        tried = []
        for rung, label in self.labels.items():
            points = {t.value: t.loss for t in self.plan.trials if t.rung == rung and t.loss}
            if points:
                tried.append(Line(label, [*points], [*points.values()], colours[label]))
        if self.plan.tune and tried:
            caption = "What tuning tried: the loss on the last tenth of the training split by"
            charts[f"{caption} {self.plan.tune}"] = chart_data(tried, {}, self.plan.tune)
        models = models_to_try({self.labels[rung.model]: rung.run for rung in self.rungs})
        prompt = self.plan.prompt or first_text([rung.run for rung in self.rungs])
        notes = self.certainty, self.equality, self.tuning
        page = render(
            "ladder.html",
            script="ladder_page.js",
            data={"models": models, "prompt": prompt, "charts": [*charts.values()]},
            heading=f"{self.path.name}: what each rung gains",
            verdict=self.verdict,
            models=models,
            train_sha256=self.plan.train_sha256,
            again=ladder_command(self.plan),
            version=attnlm.__version__,
            ladder=self,
            losses=self.table(),
            verdicts=self.verdicts(),
            notes=[re.sub(r"`(\w+)`", lambda setting: flag(setting[1]), note) for note in notes],
            captions=[*charts],
            colours=colours,
            references=references,
        )
        path = self.path / "index.html"
        files.write_bytes(path, page)
        return path


def _comparison(pair: Pair, why: str, why_not: str) -> str:
    """Return the sentence on a gain: what the interval shows, and a reason for it."""
    nats = pair.difference
    if pair.verdict == "the same":
        return f"The same loss as {pair.rival}, up to rounding"
    if pair.interval is not None and pair.verdict == "not shown":
        needed = f"about {pair.seeds_needed} seeds" if pair.seeds_needed else "over 100 seeds"
        return (
            f"Not shown to differ from {pair.rival}: the interval for the difference, "
            f"{interval_text(pair.interval)} nats per token, includes 0; to show a difference of "
            f"{abs(nats):.4f} takes {needed}"
        )
    difference = f"{abs(nats):.3f} nats per token {'better' if nats > 0 else 'worse'}"
    interval = f" ({interval_text(pair.interval)})" if pair.interval else ""
    reason = why if nats > 0 else why_not
    return f"{difference} than {pair.rival}{interval}" + (f": {reason}" if reason else "")


def _setting_warnings(ladder: Ladder) -> Iterator[str]:
    configs = {rung.model: rung.run.config for rung in ladder.rungs}
    own = [model for model, config in configs.items() if config.codes]
    if own and len(own) < len(configs):
        yield (
            f"seconds: {', '.join(own)} ran as PyTorch modules; the other rungs have faster forms, "
            "so that a difference in time is not the cost of the idea"
        )
    compared = {
        "optimizer and learning rate are the defaults of each rung": {
            model: f"(optimizer {config.training.optimizer}, "
            f"learning rate {config.training.learning_rate:g})"
            for model, config in configs.items()
            if not {"optimizer", "learning_rate"} & {*variant(model), ladder.plan.tune}
        },
        "steps are not equally large, in tokens": {
            model: f"{config.training.batch_size} × {config.spec.block_size}"
            for model, config in configs.items()
        },
    }
    for warning, value_of in compared.items():
        models_of: dict[str, list[str]] = {}
        for model, value in value_of.items():
            models_of.setdefault(value, []).append(model)
        if len(models_of) > 1:
            groups = (f"{', '.join(models)} {value}" for value, models in models_of.items())
            yield f"{warning}: {'; '.join(groups)}"


def _size_warnings(ladder: Ladder) -> Iterator[str]:
    specs = {rung.model: rung.run.config.spec for rung in ladder.rungs}
    for model, deviation in ladder.unequal.items():
        has_width = ladder.plan.equal != "parameters" or size_settings(specs[model])[0]
        why = "" if has_width else f": it has no {', '.join(WIDTHS)} to adapt"
        quantity = _QUANTITIES[ladder.plan.equal][0]
        yield f"{quantity} are not equal to those of {ladder.reference}: {model}{deviation}{why}"
    sizes = {rung.run.parameters: rung.model for rung in ladder.rungs}
    if max(sizes) > 2 * min(sizes) and ladder.plan.equal != "parameters":
        yield (
            f"{sizes[max(sizes)]} has {max(sizes) / min(sizes):,.1f} times as many parameters as "
            f"{sizes[min(sizes)]}"
        )


def _step_warnings(ladder: Ladder) -> Iterator[str]:
    for rung in ladder.rungs:
        last = rung.result.last
        steps = ladder.plan.settings(rung.model, 0)["steps"]
        if last.step != steps:
            yield f"{rung.model} made {last.step:,} steps, not {steps:,}"
        if last.val_loss > rung.result.best.val_loss:
            best_step = rung.result.final.step
            yield f"{rung.model} is shown at step {best_step:,}: its loss rose after that"
    fewest = min(ladder.rungs, key=lambda rung: rung.result.last.step)
    if (steps := fewest.result.last.step) < FEW_STEPS:
        yield f"models learn next to nothing in so few steps: {fewest.model} made {steps}"
    for rung, gain in zip(ladder.rungs, ladder.gains, strict=True):
        if gain is not None:
            fall = max(recent_fall(r.result.records) for r in (rung, gain.rival))
            if fall > max(NOTICEABLE, abs(gain.nats)):
                yield (
                    f"too few steps to rank {gain.rival.model} and {rung.model}: they are "
                    f"{abs(gain.nats):.3f} apart, and a loss fell by {fall:.3f} over the last "
                    "fifth of training"
                )
