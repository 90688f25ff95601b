"""Measure and name the heads of a run, the loss without each head, and scores over training.

Axes: N windows, T tokens, L layers, H heads, P patterns, S snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.events import OnEvent, Progress, ignore
from attnlm.base.files import read_text
from attnlm.model.language_model import LanguageModel
from attnlm.model.recorder import Head, record, require_attention, silence, texts_at_once
from attnlm.runs.load_model import load_model
from attnlm.runs.run import Run, open_run
from attnlm.see.head_scores import (
    BATCH_TOKENS,
    PATTERNS,
    by_pattern,
    check_length,
    choose_name,
    mean_scores,
    repeated_random_tokens,
)
from attnlm.see.pictures import Grid, Numbers, Pictured
from attnlm.see.shown_tokens import check_windows
from attnlm.training.validation import Split, windows_of

_MOST_SNAPSHOTS = 11  # in a table, which then has 80 columns


@dataclass(frozen=True)
class HeadReport:
    """One head: its layer and number, from 0; scores by pattern, name, and effect on the loss."""

    layer: int
    head: int
    scores: dict[str, float]
    name: str
    loss_change: float | None
    """loss without the head minus loss with it, in nats per token, if measured"""


@dataclass(frozen=True, repr=False)
class HeadsReport(Pictured):
    """Scores of all heads of a run, measured over `windows` windows of `window` tokens."""

    windows: int
    window: int
    measured_on: str
    """the windows, in words"""
    heads: list[HeadReport]
    chance: dict[str, float]
    """the score of uniform attention, by pattern"""
    loss: float | None
    """the loss over the same windows with no head silenced, if measured"""

    def __str__(self) -> str:
        """Return a table with a row for each head, which fits 80 columns."""
        titles = [pattern.partition("-")[0] for pattern in PATTERNS]
        titles += ["ablated"] if self.loss is not None else []

        def row(start: str, cells: Iterable[str]) -> str:
            columns = (
                f"{cell:>{max(6, len(t) + 1)}}" for cell, t in zip(cells, titles, strict=False)
            )
            return f"{start:<25}{''.join(columns)}"

        lines = [row("layer head name", titles)]
        for head in self.heads:
            cells = [f"{head.scores[pattern]:.3f}" for pattern in PATTERNS]
            cells += [] if head.loss_change is None else [f"{head.loss_change:+z.4f}"]
            lines.append(row(f"{head.layer + 1:>5} {head.head + 1:>4} {head.name}", cells))
        chance = (f"{self.chance[pattern]:.3f}" for pattern in PATTERNS)
        return "\n".join([*lines, row("uniform attention", chance)])

    @property
    def title(self) -> str:
        return f"{self.run}, measured over {self.measured_on}"

    @property
    def grids(self) -> list[Grid]:
        """The scores as tables: layers by heads."""
        rows = [f"layer {n + 1}" for n in range(self.heads[-1].layer + 1)]
        columns = [str(n + 1) for n in range(self.heads[-1].head + 1)]
        grids = []
        for pattern in PATTERNS:
            scores = np.array([head.scores[pattern] for head in self.heads])
            grids.append(Grid(pattern, rows, columns, scores.reshape(len(rows), -1), "head"))
        return grids

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values, in which layers and heads count from 1."""
        heads = [{**vars(h), "layer": h.layer + 1, "head": h.head + 1} for h in self.heads]
        return {**vars(self), "heads": heads}


def heads(
    run: str | Path | Run | None = None,
    *,
    windows: int = 64,
    ablate: bool = False,
    text: str | Path | None = None,
    checkpoint: str = "auto",
    device: str = "auto",
    on_event: OnEvent | None = None,
) -> HeadsReport:
    """Score and name every head of a run (default: the one trained last) by what it attends to.

        report = attnlm.heads("multi-head-001", windows=8, ablate=True)
        for head in report.heads:
            print(head.layer, head.head, head.name, head.scores["previous-token"], head.loss_change)
        print(report)  # as a table

    At most `windows` windows of a text are measured, evenly spaced. `text` is the path of a file;
    default: the run's validation split. If the split consists of questions with answers,
    windows hold whole examples, and the loss counts the same targets as in training. Induction is
    always measured on random tokens. If the run was imported and `text` is None, all other scores
    are measured on them too. If `ablate` is True, one head after another is silenced, and the loss
    is measured over the same windows. `on_event` receives events of type Progress.

    Raises AttnlmError if `ablate` is True but there is no text, if files are missing or damaged,
    for a text or a context that is too short, for a model without attention, and for NaN and
    infinity.
    """
    check_windows(windows)
    run = open_run(run)
    spec = run.config.spec
    require_attention(spec)
    random_NT = repeated_random_tokens(run.vocab_size, spec.block_size, windows)
    measured_on = f"{random_NT.shape[1] // 2} random tokens, repeated once"
    inputs_NT, targets_NT = random_NT, None
    if text is not None or not run.imported_from:
        split = _split_of(run, text)
        length = min(spec.block_size, len(split.tokens) - 1)
        check_length(length)
        inputs_NT, targets_NT = (
            ids.astype(np.int64) for ids in windows_of(split, length, windows, run.vocab_size)
        )
        total = split.windows(length)
        random_NT = random_NT[: len(inputs_NT)]
        count = "all" if len(inputs_NT) == total else f"{len(inputs_NT):,} of"
        measured_on = f"{count} {total:,} windows of {length} tokens (induction: {measured_on})"
    else:
        measured_on = f"{windows:,} windows of {measured_on}"
    if ablate and targets_NT is None:
        message = f"{run.name} was imported and has no text to measure a loss on"
        raise AttnlmError(message, "use `text`")
    model, placed = load_model(run, checkpoint=checkpoint, device=device)
    scores_LHP, chance_P = mean_scores(model, inputs_NT, random_NT, placed.torch)
    layers, heads, _ = scores_LHP.shape
    loss: float | None = None
    changes: dict[Head, float] = {}
    if ablate:
        inputs, targets = (torch.from_numpy(x).to(placed.torch) for x in (inputs_NT, targets_NT))
        loss = _loss_without(model, inputs, targets, None)
        for number, place in enumerate(np.ndindex(layers, heads)):
            (on_event or ignore)(Progress("ablate", number, layers * heads, "head"))
            changes[place] = _loss_without(model, inputs, targets, place) - loss
    chance = by_pattern(chance_P.numpy())
    scores_MP = scores_LHP.flatten(0, 1).numpy()
    reports = []
    for number, (layer, head) in enumerate(np.ndindex(layers, heads)):
        scores = by_pattern(scores_MP[number])
        others_MP = np.delete(scores_MP, number, 0)
        medians = by_pattern(np.median(others_MP, 0)) if len(others_MP) else {}
        name = choose_name(scores, chance, medians)
        reports.append(HeadReport(layer, head, scores, name, changes.get((layer, head))))
    windows, window = inputs_NT.shape
    return HeadsReport(run.name, windows, window, measured_on, reports, chance, loss)


def _split_of(run: Run, text: str | Path | None) -> Split:
    """Return the tokens of a text file, or the run's validation split."""
    if text is not None:  # an array, since the file may be long
        return Split(run.tokenizer.encode_array(read_text(Path(text))))
    try:
        return Split.of(run.open_dataset(), run.config.training)
    except AttnlmError as error:
        raise AttnlmError(error.message, f"{error.hint}; or use `text`") from None


def _loss_without(
    model: LanguageModel, inputs_NT: Tensor, targets_NT: Tensor, silenced: Head | None
) -> float:
    """Return the mean loss of all windows with a silenced head, or with none."""
    losses = []
    batch_size = texts_at_once(model, inputs_NT.size(1), BATCH_TOKENS)
    batches = zip(inputs_NT.split(batch_size), targets_NT.split(batch_size), strict=True)
    for inputs_BT, targets_BT in batches:
        logits = record(model, inputs_BT, silence(silenced)).logits.flatten(0, 1)
        losses.append(float(F.cross_entropy(logits, targets_BT.flatten(), reduction="sum")))
    loss = math.fsum(losses) / max(1, int((targets_NT >= 0).sum()))
    if not math.isfinite(loss):
        raise NotFiniteError
    return loss


@dataclass(frozen=True, repr=False)
class HeadsOverTraining(Pictured):
    """The scores of all heads of a run at each of S snapshots."""

    steps: list[int]
    """the step of each snapshot"""
    scores: dict[str, Numbers]
    """(S, L, H): how the scores of each pattern change"""

    @property
    def title(self) -> str:
        return f"Scores of the heads of {self.run} in snapshots during its training"

    @property
    def grids(self) -> list[Grid]:
        """The scores as tables: heads by steps, of which the first, the last and 9 others."""
        last = len(self.steps) - 1
        shown = np.linspace(0, last, min(last + 1, _MOST_SNAPSHOTS)).round().astype(int)
        layers, heads = next(iter(self.scores.values())).shape[1:]
        rows = [f"layer {n + 1} head {h + 1}" for n, h in np.ndindex(layers, heads)]
        steps = [str(self.steps[number]) for number in shown]
        return [
            Grid(pattern, rows, steps, scores_SLH[shown].reshape(len(shown), -1).T, "step")
            for pattern, scores_SLH in self.scores.items()
        ]

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        rounded = {name: x.astype(float).round(3).tolist() for name, x in self.scores.items()}
        return {**vars(self), "scores": rounded}


def heads_over_training(
    run: str | Path | Run | None = None,
) -> HeadsOverTraining:
    """Return the scores of every head of a run (default: the one trained last) in each snapshot.

        over_training = attnlm.heads_over_training("transformer-001")
        over_training.scores["induction"][:, 1, 0]  # of layer 2, head 1, at over_training.steps
        print(over_training)  # as tables

    Training measured them as `heads` does, over fewer windows, and kept them in the run's
    snapshots. Raises AttnlmError for a run without such snapshots, for a damaged file, and for a
    model without attention.
    """
    run = open_run(run)
    require_attention(run.config.spec)
    scores_of = {
        snapshot.step: snapshot.scores
        for snapshot in run.ticker()
        if len(snapshot.scores) == len(PATTERNS)
    }
    if not scores_of:
        raise AttnlmError(
            f"{run.name} has no snapshots with scores of its heads",
            "training keeps them every `eval_every` steps, if it observes maps",
        )
    scores_PSLH = np.array([*scores_of.values()], np.float32).swapaxes(0, 1)
    return HeadsOverTraining(run.name, [*scores_of], dict(zip(PATTERNS, scores_PSLH, strict=True)))
