"""Collect the results of a run, for an HTML page or for use in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent
from attnlm.base.folders import resume_command
from attnlm.base.formatting import duration
from attnlm.model.recorder import NotRecordedError
from attnlm.runs.journal import Snapshot, packed_maps
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Result, Run, open_run, run_summary
from attnlm.see.attend import (
    CAUTION,
    Attention,
    compute_attention,
    packed_attention,
)
from attnlm.see.curves import chart_data, run_lines, verdict
from attnlm.see.head_scores import PATTERNS, TooShortError
from attnlm.see.heads import HeadsReport, heads
from attnlm.see.model_page import first_text, models_to_try
from attnlm.see.page import render
from attnlm.see.reproduce import import_command, prepare_command, train_command
from attnlm.see.shown_tokens import check_windows, ids_within_context, visible

_MOST_SNAPSHOTS = 32
_MOST_FILMS = 36  # heads, each of about 10 kB


@dataclass(frozen=True, repr=False)
class Report:
    """A run's training, its snapshots, the scores of its heads, and the model or its attention."""

    run: Run
    checkpoint: str
    """best, last, or a step that was kept"""
    result: Result | None
    """the results of the run's evaluations; None for an imported run"""
    text: str
    """the text that the page begins with"""
    models: Sequence[dict[str, Any]]
    """the model, as the page runs it; empty if it is too large, or has own code"""
    attention: Attention | None
    """what the heads of a model that cannot run in a page attend to in `text`, if known"""
    heads: HeadsReport | None
    not_measured: str
    """why there are no scores of heads; empty if there are"""
    commands: Sequence[str]
    """the commands that reproduce the run, without `prepare` if the data set is missing"""

    def __repr__(self) -> str:
        return f"<Report of {self.run.name!r}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """A sentence on how the training went."""
        if self.result is None:
            return "it was imported, so the page shows no training"
        return verdict(self.run, self.result)

    def facts(self) -> dict[str, Any]:
        """Return the main results as JSON values."""
        best = self.result and self.result.final
        return {
            "run": str(self.run.path),
            "model": self.run.config.spec.name,
            "parameters": self.run.parameters,
            "parent": self.run.parent and asdict(self.run.parent),
            "imported_from": self.run.imported_from or None,
            "val_loss": best and best.val_loss,
            "bits_per_byte": best and best.bits_per_byte,
            "accuracy": best and best.accuracy,
            "verdict": self.verdict,
            "heads": [] if self.heads is None else self.heads.facts()["heads"],
            "commands": list(self.commands),
        }

    def write_page(self, path: str | Path | None = None) -> Path:
        """Write all of this as one HTML page that works offline; return the page's path.

        The default path is report.html in the run's folder. A file at `path` is replaced.
        """
        page = self.run.path / "report.html" if path is None else Path(path)
        files.write_bytes(page, self.page())
        return page

    def page(self) -> bytes:
        """Return the page, in UTF-8, with the same bytes for the same report."""
        run = self.run
        all_snapshots = run.ticker()
        snapshots = _some(all_snapshots)
        records = self.result.records if self.result else []
        losses = {record.step: record.val_loss for record in records}
        passage = run.ticker_passage()
        has_curve = len(records) > 1
        data = {
            "models": self.models,
            "prompt": self.text,
            "attention": self.attention and packed_attention(self.attention),
            "curve": has_curve and chart_data(run_lines(records), run.references(), "step"),
            "snapshots": [
                {"step": s.step, "loss": losses.get(s.step), "text": _with_symbols(s.text)}
                for s in snapshots
            ],
            "films": _films(snapshots, len(passage)),
            "passage": [visible(token) for token in passage],
        }
        summary = run_summary(run)
        if records:
            device = run.config.training.device
            spent = f"{records[-1].tokens:,} tokens, {duration(records[-1].seconds)} on {device}"
            summary["training"] = spent
        spec_or_all = run.config.spec if run.imported_from else run.config
        return render(
            "report.html",
            script="report_page.js",
            data=data,
            report=self,
            run=run,
            records=records,
            facts=summary,
            settings=spec_or_all.settings(),
            all_snapshots=len(all_snapshots),
            caution=CAUTION,
            patterns=PATTERNS,
            version=attnlm.__version__,
        )


def _some(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return at most _MOST_SNAPSHOTS: the first ones, and others evenly spaced, with the last."""
    first = _MOST_SNAPSHOTS // 2
    if len(snapshots) <= _MOST_SNAPSHOTS:
        return [*snapshots]
    later = np.linspace(first, len(snapshots) - 1, first).round().astype(int)
    return [*snapshots[:first], *(snapshots[number] for number in later)]


def _with_symbols(text: str) -> str:
    """Return a text with symbols for invisible characters except spaces and line ends."""
    return "".join(c if c in " \n" else visible(c) for c in text.replace("\r\n", "\n"))


def _films(snapshots: Sequence[Snapshot], length: int) -> list[dict[str, Any]]:
    """Return the heads' maps and previous-token scores over training, largest final score first.

    The result is empty if maps were not recorded, or if the passage is a single token. If a model
    has many heads, the result has only the first ones.
    """
    maps = [s.weights for s in snapshots if s.weights is not None]
    if not maps or len(maps) < len(snapshots) or length < 2:
        return []
    # The previous-token scores of head_scores.py: the mean weight of the previous token.
    maps_SLHTT = np.stack(maps)
    scores_SLH = np.diagonal(maps_SLHTT, -1, -2, -1).mean(-1).astype(float).round(3)
    films = [
        {
            "name": f"layer {layer + 1} head {head + 1}",
            "maps": packed_maps(maps_SLHTT[:, layer, head]),
            "scores": scores_SLH[:, layer, head].tolist(),
        }
        for layer, head in np.ndindex(*scores_SLH.shape[1:])
    ]
    return sorted(films, key=lambda film: -film["scores"][-1])[:_MOST_FILMS]


def report(
    run: str | Path | Run | None = None,
    *,
    text: str | None = None,
    windows: int = 16,
    ablate: bool = False,
    checkpoint: str = "auto",
    device: str = "auto",
    on_event: OnEvent | None = None,
) -> Report:
    """Collect the results of a run (default: the one trained last).

        report = attnlm.report("multi-head-001", windows=4)
        print(report.verdict)
        report.write_page("report.html")

    The page runs the model, and begins with `text` (default: the beginning of the validation
    split). If the page cannot run the model, it shows what each head attends to in this text. Heads
    are scored over `windows` windows of the validation split; of an imported run, which has none,
    on random tokens. If `ablate` is set, the loss is also measured with each head silenced in turn.
    If the data set is missing, heads are not scored. `on_event` receives events of type Progress
    for each silenced head.

    Raises AttnlmError if the text does not fit the context or the vocabulary, if the run was
    trained here and never evaluated, and if the run's files are missing or damaged.
    """
    check_windows(windows)
    run = open_run(run)
    result = run.result()
    if result is None and not run.imported_from:
        message = f"{run.name} has no evaluations yet"
        raise AttnlmError(message, f"resume it: {resume_command(run.path)}")
    if text is not None:
        ids_within_context(run, text)  # raises an error
    checkpoint = run.checkpoint(checkpoint).which
    begins = first_text([run]) if text is None else text
    models = models_to_try({run.name: run}, checkpoint)
    attention = scores = None
    not_measured = "" if run.config.spec.has_attention else "the model has none"
    if not models and begins and not not_measured:
        model, _ = load_model(run, checkpoint=checkpoint, device="cpu")
        with contextlib.suppress(NotRecordedError):
            attention = compute_attention(run, model, ids_within_context(run, begins))
    commands = [import_command(run) if run.imported_from else train_command(run)]
    if not run.imported_from:
        try:
            commands.insert(0, prepare_command(run.open_dataset()))
        except AttnlmError as error:
            not_measured = not_measured or error.message
    if not not_measured:
        try:
            scores = heads(
                run,
                windows=windows,
                ablate=ablate,
                checkpoint=checkpoint,
                device=device,
                on_event=on_event,
            )
        except (NotRecordedError, TooShortError) as error:
            not_measured = error.message
    return Report(
        run=run,
        checkpoint=checkpoint,
        result=result,
        text=begins,
        models=models,
        attention=attention,
        heads=scores,
        not_measured=not_measured,
        commands=commands,
    )
