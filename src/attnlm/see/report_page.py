"""A run's report as one HTML page, to be read from top to bottom, by keyboard, or on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import attnlm
from attnlm.base.readable import duration
from attnlm.runs.ticker import Snapshot
from attnlm.see.attend_page import SCRIPTS, attention_parts
from attnlm.see.curves import panel_sides, panel_svg, run_lines
from attnlm.see.film import previous_token_score, strip
from attnlm.see.heads import HeadReport
from attnlm.see.lens import lens_data
from attnlm.see.page import render
from attnlm.see.patterns import PATTERNS
from attnlm.see.report import Report
from attnlm.see.reproduce import report_command
from attnlm.see.text import visible

_MOST_SNAPSHOTS = 32
_MOST_FILMS = 36
_MOST_COLUMNS = 24  # of the logit lens


def report_page(report: Report) -> bytes:
    """The page, in UTF-8: the same bytes for the same report."""
    kept = _thinned(report.snapshots)
    data, content = attention_parts(report.attention)
    data["snapshots"], data["films"] = _snapshots(report, kept), _films(kept)
    data["lens"] = lens_data(report.lens, report.attention.vocabulary)
    return render(
        "report.html",
        scripts=(
            *SCRIPTS,
            *(("lens.js",) if report.lens else ()),
            *(("report.js",) if kept else ()),
        ),
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
        all_films=report.run.config.model.layers * report.run.config.model.maps_per_layer,
        passage=_passage(report),
        lens=_lens(report),
        lens_last=_lens_last(report),
        lens_tokens=content["shown"][-_MOST_COLUMNS:],
        came=content["shown"][-_MOST_COLUMNS:][1:],
        patterns=PATTERNS,
        heat_rows=_by_layer(report),
        version=attnlm.__version__,
        **content,
    )


def _facts(report: Report) -> dict[str, str]:
    run, best = report.run, report.best
    facts = {"model": f"{run.config.model.model}, {run.parameters:,} parameters"}
    if best is None:
        return {
            **facts,
            "vocabulary": f"{run.vocab_size:,} ids ({run.tokenizer.name})",
            "imported from": run.imported_from,
        }
    last = report.records[-1]
    return {
        **facts,
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
        **{label: f"{loss:z.4f}" for label, loss in run.references().items()},
        "training": f"{last['step']:,} steps, {last['tokens']:,} tokens, "
        f"{duration(last['seconds'])} on {run.config.training.device}",
    }


def _settings(report: Report) -> dict[str, Any]:
    """Of an imported run only those of the model: no training here has used the others."""
    words = {True: "yes", False: "no"}
    config = report.run.config
    settings = config.model.settings() if report.run.imported_from else config.settings()
    return {
        name.replace("_", " "): words[value] if isinstance(value, bool) else value
        for name, value in settings.items()
    }


def _curve(report: Report) -> str | None:
    """None where there are fewer than two evaluations."""
    if len(report.records) < 2:
        return None
    return panel_svg(run_lines(report.records), report.run.references(), "step")


def _by_layer(report: Report) -> list[list[HeadReport]]:
    heads = [] if report.heads is None else report.heads.heads
    layers = [head.layer for head in heads]
    return [[head for head in heads if head.layer == layer] for layer in sorted(set(layers))]


def _thinned(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """At most so many, spread evenly, with the first and the last."""
    count = min(len(snapshots), _MOST_SNAPSHOTS)
    chosen = np.linspace(0, len(snapshots) - 1, count).round().astype(int)
    return [snapshots[number] for number in chosen]


def _snapshots(report: Report, kept: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Of each its step, loss and text, and where its step is across the picture of the curve."""
    if not kept:
        return []
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
    """For each head its strip, and its previous-token scores; none where no maps were recorded.

    Of many heads, only those with the largest scores in the end: a strip takes tens of KB.
    """
    maps = [snapshot.maps for snapshot in snapshots if snapshot.maps is not None]
    shapes = {one.shape for one in maps}
    if len(maps) < len(snapshots) or len(shapes) != 1 or maps[0].shape[-1] < 2:
        return []
    scores = {
        place: [round(previous_token_score(one[place]), 3) for one in maps]
        for place in np.ndindex(*maps[0].shape[:2])
    }
    best = sorted(scores, key=lambda place: scores[place][-1], reverse=True)[:_MOST_FILMS]
    return [
        {
            "name": f"layer {place[0] + 1} head {place[1] + 1}",
            "strip": strip([one[place] for one in maps]),
            "scores": scores[place],
        }
        for place in sorted(best)
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
                    row.ids[-_MOST_COLUMNS:, 0].tolist(),
                    row.probabilities[-_MOST_COLUMNS:, 0].tolist(),
                    came,
                    strict=True,
                )
            ],
        )
        for row in report.lens
    ]


def _lens_last(report: Report) -> list[tuple[str, list[tuple[str, float]]]]:
    """Rows of cells: the likeliest tokens after the last one, with their probabilities."""
    vocabulary = report.attention.vocabulary
    return [
        (
            row.name,
            [
                (visible(vocabulary[i]), p)
                for i, p in zip(row.ids[-1].tolist(), row.probabilities[-1].tolist(), strict=True)
            ],
        )
        for row in report.lens
    ]
