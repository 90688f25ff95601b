"""Examine the library of heads, and write the cards into docs/heads.md.

    python tools/write_heads.py FOLDER [CANDIDATE…]

FOLDER keeps the exams and the trainings on texts: what is there is taken. With candidates, only
these are trained, so that several processes share the work, and nothing is written.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import attnlm
from attnlm.base.events import ignore
from attnlm.base.heads import head_names, list_heads
from attnlm.runs.exam_plan import STANDARD, SUITE, ExamPlan
from attnlm.see.exam_card import Exam
from attnlm.see.verdicts import interval_text
from attnlm.workflows.match_compute import with_mlp_width
from attnlm.workflows.train_all import train_all

HEADS = Path(__file__).parents[1] / "docs" / "heads.md"
BEGIN = "<!-- tools/write_heads.py writes what follows. -->\n"
CANDIDATES = (*head_names(), "transformer:positions=none", "transformer:kv_heads=1")
CONTEXT, BATCH, STEPS = 64, 32, 300
LOSSES = f"""\
Validation losses in nats per token, after as many FLOPs as the standard needs for {STEPS} steps of
{BATCH} × {CONTEXT} tokens; one seed. Below are the rank correlations (Spearman) of a card's mean
score with low losses, and their 95% intervals by drawing the heads anew."""


def texts(folder: Path) -> dict[str, attnlm.Dataset]:
    """Return the texts: tales, Tiny Shakespeare if it is there, and Python's asyncio."""
    sources = {"tales": "tales", "python": str(Path(asyncio.__file__).parent / "*.py")}
    if (shakespeare := folder / "tinyshakespeare.txt").exists():
        sources["shakespeare"] = str(shakespeare)
    data = folder / "texts"
    return {
        name: attnlm.prepare(source, name=name, data_dir=data) for name, source in sources.items()
    }


def examine(candidate: str, folder: Path, seed: int = 1) -> Exam:
    """Take an exam, or return the one that was taken."""
    name = f"{candidate.replace(':', '-').replace('=', '-')}-from-{seed}"
    path = folder / name
    if path.exists():
        return attnlm.exam(resume=path)
    return attnlm.exam(candidate, name=name, checkpoint_dir=folder, seed=seed)


def loss_on(dataset: attnlm.Dataset, plan: ExamPlan, folder: Path) -> float:
    """Return the loss of a candidate's model after as many FLOPs as STEPS of the standard take."""
    usual = {**STANDARD.model("tales"), "block_size": CONTEXT}
    model = {**plan.model("tales"), "block_size": CONTEXT}
    count, flops = (size_of({"model": "transformer", **usual}, dataset, of) for of in (0, 1))
    model = with_mlp_width(model, count, dataset.vocab_size)
    steps = round(STEPS * flops / size_of(model, dataset, 1))
    settings = {**model, "batch_size": BATCH, "steps": steps, "eval_tokens": 2**15, "seed": 1}
    settings |= {"learning_rate": 0.02}
    name = f"{dataset.name}-{plan.candidate.replace(':', '-').replace('=', '-')}"
    (run,) = train_all({name: settings}, dataset, folder / "on-texts", ignore).values()
    return run.evaluations()[-1].val_loss


def size_of(settings: Any, dataset: attnlm.Dataset, which: int) -> int:
    """Return the parameters (0) or the FLOPs per token (1) of a model."""
    from attnlm.config.settings import resolve
    from attnlm.model.own_arguments import with_defaults
    from attnlm.model.spec import parameter_count

    spec = with_defaults(resolve({}, settings).spec)
    if which == 0:
        return parameter_count(spec, dataset.vocab_size)
    return spec.costs(dataset.vocab_size).training_flops


def rank_correlation(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Return Spearman's correlation, and its 95% interval by drawing the pairs anew."""
    draws = np.random.default_rng(1)
    pairs = np.array([a, b])

    def of(chosen: Any) -> float:
        ranks = np.argsort(np.argsort(pairs[:, chosen], axis=1), axis=1)
        table: Any = np.corrcoef(ranks)
        return float(table[0, 1])

    n = len(a)
    drawn = [of(draws.integers(n, size=n)) for _ in range(5000)]
    low, high = (np.quantile(drawn, share) for share in (0.025, 0.975))
    return of(np.arange(n)), float(low), float(high)


def page(cards: dict[str, Exam], losses: dict[str, dict[str, float]]) -> str:
    """Return the generated part of docs/heads.md."""
    lines = ["## All cards in one table", ""]
    lines += ["Differences from the standard; a bold one is a verdict, better or worse.", ""]
    lines += ["| | " + " | ".join(SUITE) + " | mean |", "| --- |" + " ---: |" * (len(SUITE) + 1)]
    first = next(iter(cards.values()))
    means = [statistics.fmean(one.scores("standard")) for one in first.results]
    row = " | ".join(f"{mean:.0f}" for mean in means)
    lines.append(f"| the standard's scores | {row} | {statistics.fmean(means):.0f} |")
    for name, card in cards.items():
        cells = [cell(one) for one in card.results]
        lines.append(f"| [{name}](#{anchor(name)}) | {' | '.join(cells)} | {mean_of(card):.0f} |")
    lines += ["", "## Scores and losses", "", LOSSES, ""]
    lines += [f"| | {' | '.join(losses)} |", "| --- |" + " ---: |" * len(losses)]
    for name in cards:
        each = " | ".join(f"{of[name]:.4f}" for of in losses.values())
        lines.append(f"| {name} | {each} |")
    lines.append("")
    for text, of in losses.items():
        found = rank_correlation([mean_of(cards[name]) for name in cards], [-of[n] for n in cards])
        lines.append(
            f"- {text}: {found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})".replace("-0", "−0")
        )
    lines += ["", "## The cards", ""]
    about = {head.name: head for head in list_heads()}
    for name, card in cards.items():
        lines += [f"### {name}", ""]
        if name in about:
            head = about[name]
            lines += [head.idea, "", f"{head.source}; `{head.command}`", ""]
        lines += [f"{card.verdict[0].upper()}{card.verdict[1:]}.", ""]
        lines += ["| task | score | standard | difference | its interval | verdict |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | --- |"]
        for one in card.results:
            if one.pair is None:
                lines.append(f"| {one.task} | failed: {one.failed} | | | | |")
                continue
            mine, usual = (statistics.fmean(one.scores(s)) for s in ("candidate", "standard"))
            between = interval_text(one.pair.interval, ".1f")
            amount = f"{one.pair.difference:+z.1f}".replace("-", "−")
            row = f"{mine:.1f} | {usual:.1f} | {amount} | {between} | {one.verdict}"
            lines.append(f"| {one.task} | {row} |")
        lines.append("")
    return "\n".join(lines)


def cell(one: Any) -> str:
    """Return a task's difference, bold if it is shown."""
    if one.pair is None:
        return "failed"
    text = f"{one.pair.difference:+z.0f}".replace("-", "−")
    return f"**{text}**" if one.verdict in ("better", "worse") else text


def mean_of(card: Exam) -> float:
    """Return the mean score of the candidate."""
    return statistics.fmean(
        statistics.fmean(one.scores("candidate")) for one in card.results if one.failed is None
    )


def anchor(name: str) -> str:
    """Return the anchor of a heading."""
    return "".join(c for c in name if c.isalnum() or c in "-_")


def main() -> None:
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    datasets = texts(folder)
    cards: dict[str, Exam] = {}
    losses: dict[str, dict[str, float]] = {name: {} for name in datasets}
    for candidate in only or CANDIDATES:
        cards[candidate] = examine(candidate, folder)
        print(candidate, cards[candidate].verdict, flush=True)
    for candidate, card in cards.items():
        for name, dataset in datasets.items():
            losses[name][candidate] = loss_on(dataset, card.plan, folder)
            print(candidate, name, f"{losses[name][candidate]:.4f}", flush=True)
    if not only:
        before, _, _ = HEADS.read_text().partition(BEGIN)
        HEADS.write_text(before + BEGIN + "\n" + page(cards, losses))


if __name__ == "__main__":
    main()
