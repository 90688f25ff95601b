"""A run's report as one HTML page, to be read from top to bottom, by keyboard, or on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import attnlm
from attnlm.base.readable import duration
from attnlm.runs.references import references_of
from attnlm.runs.ticker import Snapshot
from attnlm.see.attend_page import SCRIPTS, attention_parts
from attnlm.see.curves import panel_sides, panel_svg, run_lines
from attnlm.see.film import previous_token_score, strip
from attnlm.see.heads import PATTERNS
from attnlm.see.page import render
from attnlm.see.report import Report
from attnlm.see.reproduce import report_command
from attnlm.see.text import visible

_MOST_SNAPSHOTS = 32
_MOST_COLUMNS = 24  # of the logit lens


def report_page(report: Report) -> bytes:
    """The page, in UTF-8: the same bytes for the same report."""
    kept = _thinned(report.snapshots)
    data, content = attention_parts(report.attention)
    data["snapshots"], data["films"] = _snapshots(report, kept), _films(kept)
    return render(
        "report.html",
        scripts=(*SCRIPTS, *(("report.js",) if kept else ())),
        data=data,
        report=report,
        run=report.run,
        facts=_facts(report),
        sample=_shown(report.sample),
        report_command=report_command(report.run),
        settings=_settings(report),
        curve=_curve(report),
        snapshots=data["snapshots"],
        evaluations=len(report.records),
        films=data["films"],
        shown_film=max(
            range(len(data["films"])), key=lambda n: data["films"][n]["scores"][-1], default=0
        ),
        passage=_passage(report),
        lens=_lens(report),
        lens_tokens=content["shown"][-_MOST_COLUMNS:],
        came=content["shown"][-_MOST_COLUMNS:][1:],
        patterns=PATTERNS,
        version=attnlm.__version__,
        **content,
    )


def _facts(report: Report) -> dict[str, str]:
    run, best, last = report.run, report.best, report.records[-1]
    return {
        "model": f"{run.config.model.model}, {run.parameters:,} parameters",
        "data": f"{run.dataset['name']}: {run.vocab_size:,} ids, "
        f"{run.dataset['train_tokens']:,} tokens to train on, "
        f"{run.dataset['val_tokens']:,} to validate",
        **({"started from": run.started_from} if run.started_from else {}),
        "best loss": f"{best['val_loss']:.4f} nats per token on "
        f"{run.evaluated_part or 'the whole validation split'}, at step {best['step']:,}",
        **{
            f"{which}, whole split": f"{measured['val_loss']:.4f} nats per token, "
            f"at step {measured['step']:,}"
            for which, measured in run.whole().items()
        },
        "bits per byte": f"{best['bits_per_byte']:.3f}",
        **{label: f"{loss:z.4f}" for label, loss in references_of(run).items()},
        "training": f"{last['step']:,} steps, {last['tokens']:,} tokens, "
        f"{duration(last['seconds'])} on {run.config.training.device}",
    }


def _settings(report: Report) -> dict[str, Any]:
    words = {True: "yes", False: "no"}
    return {
        name.replace("_", " "): words[value] if isinstance(value, bool) else value
        for name, value in report.run.config.settings().items()
    }


def _curve(report: Report) -> str | None:
    """None where there are fewer than two evaluations."""
    if len(report.records) < 2:
        return None
    return panel_svg(run_lines(report.records), references_of(report.run), "step")


def _thinned(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """At most so many, spread evenly, with the first and the last."""
    count = min(len(snapshots), _MOST_SNAPSHOTS)
    chosen = np.linspace(0, len(snapshots) - 1, count).round().astype(int)
    return [snapshots[number] for number in chosen]


def _snapshots(report: Report, kept: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Of each its step, loss and text, and where its step is across the picture of the curve."""
    losses = {record["step"]: record["val_loss"] for record in report.records}
    left, right = panel_sides()
    last = report.records[-1]["step"] or 1
    return [
        {
            "step": snapshot.step,
            "loss": losses.get(snapshot.step),
            "text": _shown(snapshot.text),
            "at": round(left + (right - left) * snapshot.step / last, 5),
        }
        for snapshot in kept
    ]


def _shown(text: str) -> str:
    """A text of many lines, with signs for what else can't be seen."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("".join(c if c == " " else visible(c) for c in line) for line in lines)


def _films(snapshots: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """For each head its strip, and its previous-token scores; none where no maps were recorded."""
    maps = [snapshot.maps for snapshot in snapshots if snapshot.maps is not None]
    shapes = {one.shape for one in maps}
    if len(maps) < len(snapshots) or len(shapes) != 1 or maps[0].shape[-1] < 2:
        return []
    return [
        {
            "name": f"layer {layer + 1} head {head + 1}",
            "strip": strip([one[layer, head] for one in maps]),
            "scores": [round(previous_token_score(one[layer, head]), 3) for one in maps],
        }
        for layer, head in np.ndindex(*maps[0].shape[:2])
    ]


def _passage(report: Report) -> list[str]:
    """The tokens beside a map; dots where they were not recorded."""
    maps = report.snapshots[0].maps if report.snapshots else None
    length = 0 if maps is None else maps.shape[-1]
    shown = [visible(token) for token in report.passage]
    return shown if len(shown) == length else ["·"] * length


def _lens(report: Report) -> list[tuple[str, list[tuple[str, float, bool]]]]:
    """Rows of cells: the likeliest token, its probability, and whether that is what came."""
    came = [*report.ids[1:], -1][-_MOST_COLUMNS:]
    vocabulary = report.attention.vocabulary
    return [
        (
            row.name,
            [
                (visible(vocabulary[i]), p, i == next_id)
                for i, p, next_id in zip(
                    row.ids[-_MOST_COLUMNS:], row.probabilities[-_MOST_COLUMNS:], came, strict=True
                )
            ],
        )
        for row in report.lens
    ]
