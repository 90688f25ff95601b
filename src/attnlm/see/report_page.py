"""Make an HTML page of a run's report, for reading from top to bottom, by keyboard, or on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import attnlm
from attnlm.base.formatting import duration
from attnlm.runs.journal import EARLY_STEPS, Snapshot
from attnlm.runs.run import run_summary
from attnlm.see.attend_page import attention_content
from attnlm.see.curves import panel_svg, run_lines
from attnlm.see.head_scores import PATTERNS
from attnlm.see.page import encode_base64, render
from attnlm.see.report import LensRow, Report
from attnlm.see.reproduce import report_command
from attnlm.see.shown_tokens import visible

_MOST_SNAPSHOTS = 32
_MOST_FILMS = 36
_MOST_COLUMNS = 24  # in the logit lens


def report_page(report: Report) -> bytes:
    """Return the page, in UTF-8, with the same bytes for the same report."""
    run = report.run
    records = report.result.records if report.result else []
    snapshots = _evenly_spaced(report.snapshots)
    data, content = attention_content(report.attention)
    losses = {record.step: record.val_loss for record in records}
    data["snapshots"] = [
        {"step": s.step, "loss": losses.get(s.step), "text": _with_symbols(s.text)}
        for s in snapshots
    ]
    data["films"] = _films(report, snapshots)
    data["passage"] = [visible(token) for token in report.passage]
    data["lens"] = lens_data(report.lens, report.attention.vocabulary)
    last_scores = [film["scores"][-1] for film in data["films"]]
    lines = run_lines(records)
    summary = run_summary(run)
    if records:
        last = records[-1]
        device = run.config.training.device
        summary["training"] = f"{last.tokens:,} tokens, {duration(last.seconds)} on {device}"
    return render(
        "report.html",
        script="report_page.js" if snapshots else "attend_page.js",
        data=data,
        report=report,
        run=run,
        records=records,
        facts=summary,
        sample=_with_symbols(report.sample),
        report_command=report_command(run),
        # An imported run has no training settings of its own.
        settings=(run.config.spec if run.imported_from else run.config).settings(),
        curve=panel_svg(lines, run.references(), "step") if len(records) > 1 else None,
        snapshots=data["snapshots"],
        all_snapshots=len(report.snapshots),
        films=data["films"],
        shown_film=int(np.argmax(last_scores)) if last_scores else 0,
        all_films=math.prod(report.attention.weights.shape[:2]),
        lens_columns=range(len(report.ids))[-_MOST_COLUMNS:],
        shown=data["tokens"],
        patterns=PATTERNS,
        largest=max((abs(logit) for _, logit in report.added), default=0.0) or 1.0,
        version=attnlm.__version__,
        **content,
    )


def _evenly_spaced(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return at most _MOST_SNAPSHOTS: the early ones, and others evenly spaced, with the last."""
    early = [s for s in snapshots if s.step <= max(EARLY_STEPS)][: _MOST_SNAPSHOTS // 2]
    later = snapshots[len(early) :]
    count = min(len(later), _MOST_SNAPSHOTS - len(early))
    numbers = len(later) - 1 - np.linspace(0, len(later) - 1, count).round().astype(int)
    return early + [later[number] for number in reversed(numbers)]


def _with_symbols(text: str) -> str:
    """Return a text with symbols for invisible characters except spaces and line ends."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join("".join(c if c == " " else visible(c) for c in line) for line in lines)


def _films(report: Report, snapshots: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Return the heads' maps and previous-token scores over training.

    The result is empty if maps were not recorded, or if the passage is a single token. A map is
    stored as its lower triangle, row by row. A weight is stored in one byte, multiplied by 255 and
    rounded. If a model has many heads, the result has only the heads with the largest final scores,
    since each head takes about 10 KB.
    """
    maps = [s.maps for s in snapshots if s.maps is not None]
    shapes = {maps_LHTT.shape for maps_LHTT in maps}
    length = len(report.passage)
    if len(maps) < len(snapshots) or len(shapes) != 1 or length != maps[0].shape[-1] or length < 2:
        return []
    # The previous-token scores of head_scores.py: the mean weight of the previous token.
    maps_SLHTT = np.stack(maps)
    scores_SLH = np.diagonal(maps_SLHTT, -1, -2, -1).mean(-1).astype(float).round(3)
    films = []
    for number in sorted(np.argsort(-scores_SLH[-1].ravel(), kind="stable")[:_MOST_FILMS]):
        layer, head = divmod(int(number), scores_SLH.shape[-1])
        past = maps_SLHTT[:, layer, head][:, *np.tril_indices(length)]
        film = {
            "name": f"layer {layer + 1} head {head + 1}",
            "maps": encode_base64(np.rint(255 * past).astype(np.uint8)),
            "scores": scores_SLH[:, layer, head].tolist(),
        }
        films.append(film)
    return films


def lens_data(rows: Sequence[LensRow], vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return the logit lens for attend.js, by layer and token, the likeliest token first.

    In the result, "rows" has the layer names and "words" the distinct tokens. For each likely
    token, "ids" has its index in "words", and "percents" its probability in percent.
    """
    if not rows:
        return {"rows": []}
    ids_LTK = np.stack([row.ids for row in rows])
    distinct, places = np.unique(ids_LTK, return_inverse=True)
    percents = np.rint(100 * np.stack([row.probabilities for row in rows])).astype(int)
    return {
        "rows": [row.name for row in rows],
        "words": [visible(vocabulary[i]) for i in distinct.tolist()],
        "ids": places.ravel().tolist(),
        "percents": percents.ravel().tolist(),
    }
