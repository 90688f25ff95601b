"""Draw loss curves as pictures or plain characters, and judge a training run in words."""

from __future__ import annotations

import gc
import io
import math
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlm.base import files
from attnlm.base.events import Note, OnEvent
from attnlm.runs.journal import EvaluationRecord
from attnlm.runs.records import DatasetFacts
from attnlm.runs.run import Run
from attnlm.see.pictures import fixed_style
from attnlm.training.events import Evaluated, Finished, Started

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET = "#2b2f36", "#7d838d"
# Distinct for the colour-blind and in greyscale; the training loss is dashed, with squares.
_TRAINING, _VALIDATION = "#b85c00", "#0a4a8a"
FEW_STEPS = 10  # with fewer, a model learns next to nothing
_MARKERS = "os^Dv*PX"  # curves differ not only in colour
_WIDTH, _HEIGHT, _CHARACTER = 4.6, 3.6, 0.08  # inches: a panel, and a character in its legend
_PLAIN_SIZE = 56, 9  # characters
# Variables of page.css, which defines them for light and dark pages.
_IN_A_PAGE = {
    INK: "currentColor",
    QUIET: "var(--quiet)",
    _TRAINING: "var(--training)",
    _VALIDATION: "var(--validation)",
}

_SECONDS_BETWEEN_DRAWINGS = 20.0  # a drawing takes about 0.3 s

# Nats per token. The verdict ignores smaller differences between evaluations.
_NOTICEABLE = 0.01
_NEAR_FLOOR = 0.05
_FEW_TOKENS = 1000  # fewer validation tokens give an unreliable loss


@dataclass(frozen=True)
class Line:
    """One curve: losses in nats per token over steps, tokens or seconds."""

    label: str
    x: Sequence[float]
    losses: Sequence[float]
    colour: str
    dashed: bool = False
    band: Sequence[tuple[float, float]] = ()
    """the lowest and highest loss of several seeds at each x, if measured"""
    accuracy: Sequence[float] = ()
    """the share of right answers at each x, if measured"""


def run_lines(records: Sequence[EvaluationRecord]) -> list[Line]:
    """Return the curves of a run's validation loss and, if measured, its training loss by step."""
    if not records:
        return []
    steps = [record.step for record in records]
    losses = [record.val_loss for record in records]
    shares = [record.accuracy for record in records if record.accuracy is not None]
    accuracy = shares if len(shares) == len(records) else []
    lines = [Line("validation", steps, losses, _VALIDATION, accuracy=accuracy)]
    trained = {r.step: r.train_loss for r in records if r.train_loss is not None}
    if trained:
        lines.append(Line("training", [*trained], [*trained.values()], _TRAINING, dashed=True))
    return lines


class CurveDrawer:
    """A listener that redraws a run's curve.png during training, and passes events to `on_event`.

    It draws at evaluations, at most every 20 seconds, and at the end. If drawing fails, it sends
    one Note, and the run continues without a picture.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._run: Run | None = None
        self._due = time.perf_counter() + _SECONDS_BETWEEN_DRAWINGS

    def __call__(self, event: object) -> None:
        self._on_event(event)
        if isinstance(event, Started):
            self._run = event.run
        is_due = isinstance(event, Evaluated) and time.perf_counter() >= self._due
        if self._run is None or not (is_due or isinstance(event, Finished)):
            return
        try:
            draw_run(self._run, self._run.path / "curve.png")
            # A figure is a reference cycle: without this, about thirty would stay in memory.
            gc.collect(1)
        except Exception as error:  # noqa: BLE001 - a run must not fail for a picture
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._on_event(Note(f"curve.png cannot be drawn: {reason}"))
            self._run = None
        self._due = time.perf_counter() + _SECONDS_BETWEEN_DRAWINGS


def draw_run(run: Run, path: Path) -> None:
    """Draw training and validation loss by step, with the verdict, to a PNG at `path`.

    Draw nothing before the second evaluation: one point does not make a curve, and a run of a few
    seconds need not wait until matplotlib is loaded.
    """
    result = run.result()
    if result is None or len(result.records) < 2:
        return
    words = verdict(result.records, run.dataset, run.config.spec.name)
    if run.evaluated_part:
        words += f"; validation loss on {run.evaluated_part}"
    with fixed_style(**_STYLE):
        figure = _figure({"step": run_lines(result.records)}, run.references())
        axes = figure.axes[0]
        if result.best is not result.last:
            best = result.best
            axes.plot(
                best.step, best.val_loss, "o", markersize=9, color=_VALIDATION, fillstyle="none"
            )
        figure.suptitle(run.name, x=0.01, ha="left", fontsize=11, fontweight="bold")
        axes.set_title(textwrap.fill(words, 88), loc="left", fontsize=9)
        files.write_bytes(path, _png(figure))


def panels_png(panels: Mapping[str, Sequence[Line]], references: Mapping[str, float]) -> bytes:
    """Return a PNG with a panel for each x-axis label: curves, and lines for `references`."""
    with fixed_style(**_STYLE):
        return _png(_figure(panels, references))


def panel_svg(lines: Sequence[Line], references: Mapping[str, float], x_label: str) -> str:
    """Return one panel as an SVG element that takes font and colours from the style of its page.

    The attributes `data-left` and `data-right` are the ends of the x axis as fractions of the
    width, and `data-end` is the largest value on the axis.
    """
    file = io.StringIO()
    # Keep text as text; a fixed salt makes the bytes reproducible.
    with fixed_style(**_STYLE, **{"svg.fonttype": "none", "svg.hashsalt": f"attnlm {x_label}"}):
        figure = _figure({x_label: lines}, references)
        axes = figure.axes[0]
        figure.patch.set_visible(False)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    left, right = axes.get_position().intervalx
    svg = file.getvalue()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # ids must be unique in a page of several figures
    for colour, named in _IN_A_PAGE.items():
        svg = svg.replace(colour, named)
    place = f'data-left="{left:.4f}" data-right="{right:.4f}" data-end="{axes.get_xlim()[1]}"'
    return svg.replace("<svg ", f'<svg role="img" aria-label="loss by {x_label}" {place} ', 1)


def _figure(panels: Mapping[str, Sequence[Line]], references: Mapping[str, float]) -> Figure:
    """Return a figure with one panel for each x axis, wide enough for the names in the legends."""
    from matplotlib.figure import Figure

    names = [line.label for lines in panels.values() for line in lines]
    width = _WIDTH + _CHARACTER * max(map(len, [*names, *references]), default=0)
    figure = Figure(figsize=(len(panels) * width, _HEIGHT), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, (x_label, lines) in zip(grid[0], panels.items(), strict=True):
        _draw_losses(axes, lines, references, x_label)
    return figure


def _draw_losses(
    axes: Axes, lines: Sequence[Line], references: Mapping[str, float], x_label: str
) -> None:
    """Draw curves, and a horizontal line for each reference loss.

    The legend shows the last loss of each curve and the loss of each line, from high to low.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    end = max((line.x[-1] for line in lines), default=0) or 1
    for label, loss in references.items():
        style: dict[str, Any] = {"color": QUIET, "linewidth": 0.9, "linestyle": (0, (4, 3))}
        axes.axhline(loss, label=f"{label} {loss:z.3f}", zorder=1, **style)
    for number, line in enumerate(lines):
        if line.band:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(line.x, low, high, color=line.colour, alpha=0.2, linewidth=0)
        axes.plot(
            line.x,
            line.losses,
            label=f"{line.label} {line.losses[-1]:.3f}",
            color=line.colour,
            linewidth=1.8,
            linestyle=(0, (2.5, 1)) if line.dashed else "-",
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            clip_on=False,
        )
    by_last_loss = sorted(axes.lines, key=lambda drawn: -np.asarray(drawn.get_ydata())[-1])
    answering = [line for line in lines if line.accuracy]
    beside = 1.16 if answering else 1.0
    axes.legend(handles=by_last_loss, loc="center left", bbox_to_anchor=(beside, 0.5))
    if answering:
        _draw_accuracy(axes, answering)
    axes.set_ylabel("loss, nats per token")
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.set_xlabel(x_label)
    shortest = min((line.x[-1] for line in lines), default=end)
    if x_label not in ("step", "tokens", "seconds") or (
        x_label == "seconds" and shortest < end / 10
    ):
        axes.set_xscale("log")
        axes.set_xlabel(f"{x_label}, logarithmic")
        axes.set_xlim(right=end)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label != "seconds"))
        axes.set_xlim(0, end)
    short = EngFormatter(sep="") if x_label == "tokens" else StrMethodFormatter("{x:,.10g}")
    axes.xaxis.set_major_formatter(short)


def _draw_accuracy(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw the shares of right answers as dotted lines with an axis of their own, on the right."""
    from matplotlib.ticker import PercentFormatter

    right = axes.twinx()
    for line in lines:
        right.plot(line.x, line.accuracy, color=line.colour, linewidth=1.4, linestyle=":")
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set_ylabel("right answers (dotted)")


_STYLE: dict[str, Any] = {
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "text.color": INK,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.color": QUIET,
    "ytick.labelcolor": INK,
}


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def plain_curve(records: Sequence[EvaluationRecord], references: Mapping[str, float]) -> str:
    """Return a text plot of validation loss by step, with reference losses as dashed lines.

    The text is empty for fewer than two evaluations.
    """
    width, height = _PLAIN_SIZE
    steps = [record.step for record in records]
    losses = [record.val_loss for record in records]
    if len(steps) < 2 or steps[0] == steps[-1]:
        return ""
    low = min([*losses, *references.values()])
    high = max([*losses, *references.values()])

    def row(loss: float) -> int:
        return round((high - loss) / ((high - low) or 1) * (height - 1))

    rows = [[" "] * width for _ in range(height)]
    names = [""] * height
    for label, loss in references.items():
        rows[row(loss)] = list((" -" * width)[:width])
        names[row(loss)] = f" {label} {loss:z.2f}"
    columns = np.interp(np.linspace(steps[0], steps[-1], width), steps, losses)
    for column, loss in enumerate(columns.tolist()):
        rows[row(loss)][column] = "*"
    marks = [f"{mark:.2f}" for mark in np.linspace(high, low, height).tolist()]
    wide = max(6, *map(len, marks))
    axis = [f"{mark:>{wide}} |" for mark in marks]
    lines = map("".join, zip(axis, map("".join, rows), names, strict=True))
    first = f"{steps[0]:,}"
    below = f"{'':{wide + 2}}{first}{f'step {steps[-1]:,}':>{width - len(first)}}"
    return "\n".join([*(line.rstrip() for line in lines), below])


def verdict(records: Sequence[EvaluationRecord], dataset: DatasetFacts, model: str) -> str:
    """Return a sentence on whether the validation loss still falls, has levelled off, or rises.

    `records` are oldest first. `dataset` has the reference losses. `model` is the model's name.
    """
    tokens = records[-1].evaluated_tokens or math.inf
    accuracy = records[-1].accuracy
    words = [] if accuracy is None else [f"{accuracy:.1%} of answers right"]
    bigram_loss = dataset.bigram_loss if model == "bigram" else None
    words.append(_trend_sentence(records, dataset.floor, bigram_loss, tokens))
    best_loss = min(record.val_loss for record in records)
    if dataset.bigram_loss is not None and best_loss > dataset.bigram_loss + _NOTICEABLE:
        words.append("not as good as the counted bigram")
    if tokens < _FEW_TOKENS and accuracy is None:
        words.append(f"{tokens:,} validation tokens are too few for a reliable loss")
    return "; ".join(words)


def recent_fall(records: Sequence[EvaluationRecord]) -> float:
    """Return by how much the lowest loss fell over the last fifth of training, in nats per token.

    With fewer than three evaluations, return 0.
    """
    losses = [record.val_loss for record in records]
    tail = max(1, len(losses) // 5)
    return min(losses[:-tail]) - min(losses) if len(losses) > 2 else 0.0


def _trend_sentence(
    records: Sequence[EvaluationRecord],
    floor: float | None,
    bigram_loss: float | None,
    tokens: float,
) -> str:
    if len(records) < 3:
        return "too few evaluations to tell whether the loss still falls"
    losses = [record.val_loss for record in records]
    best = losses.index(min(losses))
    risen = losses[-1] - losses[best]
    # The loss of one token varies by about 1 between evaluations, so the mean varies by 1/√tokens.
    if risen > max(_NOTICEABLE, 2 / math.sqrt(tokens)):
        trained = [r.train_loss for r in records[best:] if r.train_loss is not None]
        since = f"step {records[best].step}"
        if trained and trained[-1] < trained[0] - _NOTICEABLE:
            why = f"overfitting since {since}: the validation loss has risen by {risen:.3f}"
        else:
            why = (
                f"the validation loss has risen by {risen:.3f} since {since} and the training "
                "loss does not fall: a lower `learning_rate` may help"
            )
        return f"{why}; the best checkpoint is kept"
    if losses[best] < (floor or 0.0) + _NEAR_FLOOR:
        distance = max(0.0, losses[best] - (floor or 0.0))
        of = "0" if floor is None else "the floor"
        return f"within {distance:.3f} of {of}: little is left to learn"
    if (fallen := recent_fall(records)) > _NOTICEABLE:
        over = "over the last fifth of training"
        return f"loss still falling ({fallen:.3f} {over}): more steps would help"
    if bigram_loss is not None and losses[best] < bigram_loss + _NOTICEABLE:
        return "as good as counted bigrams: a bigram can learn no more"
    rates = [record.learning_rate for record in records]
    if rates[-1] < max(rates) / 2:  # the lower rate may be why the loss levelled off
        return "loss levelled off as the learning rate fell: a longer run may reach a lower loss"
    return "loss levelled off: instead of more steps, try a larger model or another learning rate"
