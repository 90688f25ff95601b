"""Draw loss curves as pictures or for chart.js, and judge a training run in words."""

from __future__ import annotations

import gc
import io
import itertools
import math
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.events import Note, OnEvent
from attnlm.runs.journal import EvaluationRecord
from attnlm.runs.run import Result, Run
from attnlm.see.pictures import fixed_style
from attnlm.training.events import Evaluated, Finished, Started

_INK, _QUIET = "#2b2f36", "#7d838d"
# Distinct for the colour-blind and in greyscale; the training loss is dashed.
_TRAINING, _VALIDATION = "#b85c00", "#0a4a8a"
# Colours that are legible on white and on black.
_COLOURS = (
    "#a8607f", "#7c7fd0", "#4f8fd8", "#1f9bb5", "#2a9d6e", "#8a961c", "#d9730d",
    "#c2554d", "#8c6bb1", "#5f7f4f",
)  # fmt: skip
_IN_A_PAGE = {_TRAINING: "var(--training)", _VALIDATION: "var(--validation)"}  # of page.css
_MARKERS = "os^Dv*PX"  # curves differ not only in colour
_STYLE: dict[str, Any] = {
    "axes.edgecolor": _QUIET,
    "axes.formatter.useoffset": False,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "text.color": _INK,
    "xtick.color": _QUIET,
    "xtick.labelcolor": _INK,
    "ytick.color": _QUIET,
    "ytick.labelcolor": _INK,
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
    band: Sequence[tuple[float, float]] = ()
    """the lowest and highest loss of several seeds at each x, if measured"""
    accuracy: Sequence[float] = ()
    """the share of right answers at each x, if measured"""


def run_lines(records: Sequence[EvaluationRecord]) -> list[Line]:
    """Return the curves of a run's validation loss and, if measured, its training loss by step."""
    steps = [record.step for record in records]
    losses = [record.val_loss for record in records]
    shares = [record.accuracy for record in records if record.accuracy is not None]
    accuracy = shares if len(shares) == len(records) else []
    lines = [Line("validation", steps, losses, _VALIDATION, accuracy=accuracy)]
    trained = {r.step: r.train_loss for r in records if r.train_loss is not None}
    if trained:
        lines.append(Line("training", [*trained], [*trained.values()], _TRAINING))
    return lines


def group_lines(groups: Mapping[str, Sequence[Result]], x: str) -> list[Line]:
    """Return the curve by `x`, tokens or seconds, of the run with the median loss of each group.

    A curve by tokens has a band from the lowest to the highest loss of all seeds, unless there is
    one seed only or a seed lacks an evaluation.
    """
    colours = colours_of(groups)
    lines = []
    for name, results in groups.items():
        if results:
            shown = median(results).records
            xs, losses = [getattr(record, x) for record in shown], [r.val_loss for r in shown]
            seeds = [[record.val_loss for record in result.records] for result in results]
            has_band = x == "tokens" and len({*map(len, seeds)}) == 1 < len(seeds)
            band = [(min(at), max(at)) for at in zip(*seeds, strict=True)] if has_band else ()
            lines.append(Line(name, xs, losses, colours[name], band))
    return lines


def median(results: Sequence[Result]) -> Result:
    """Return the results with the median loss, or the lower of the two in the middle."""
    return sorted(results, key=lambda result: result.final.val_loss)[(len(results) - 1) // 2]


def colours_of(models: Iterable[str]) -> dict[str, str]:
    """Return the colour of each model or variant that is compared."""
    return dict(zip(models, itertools.cycle(_COLOURS), strict=False))


def chart_data(
    lines: Sequence[Line], references: Mapping[str, float], x_label: str
) -> dict[str, Any]:
    """Return the JSON values from which chart.js draws curves, and lines for `references`.

    The axis of seconds is logarithmic if they differ tenfold.
    """
    ends = [line.x[-1] for line in lines]
    is_wide = min(ends, default=0) < max(ends, default=0) / 10
    return {
        "x": x_label,
        "isLogarithmic": x_label == "seconds" and is_wide,
        "baselines": [*references.items()],
        "lines": [
            {
                "name": line.label,
                "colour": _IN_A_PAGE.get(line.colour, line.colour),
                "points": [*zip(line.x, line.losses, strict=True)],
                "band": [(x, *ends) for x, ends in zip(line.x, line.band, strict=False)],
                "shares": [*zip(line.x, line.accuracy, strict=False)],
            }
            for line in lines
        ],
    }


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
            reason = getattr(error, "strerror", None) or repr(error)
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
    words = verdict(run, result)
    if run.evaluated_part:
        words += f"; validation loss on {run.evaluated_part}"
    title = f"{run.name}\n{textwrap.fill(words, 88)}"
    lines = run_lines(result.records)
    files.write_bytes(path, picture(lines, run.references(), "step", title))


def picture(
    lines: Sequence[Line],
    references: Mapping[str, float],
    x_label: str,
    title: str = "",
    format: str = "png",
) -> bytes:
    """Return a picture (png, svg or pdf) of curves, and lines for `references`.

    The legend shows the last loss of each curve. Shares of right answers are dotted, with an axis
    of their own on the right.
    """
    with fixed_style(**_STYLE):
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter

        longest = max(map(len, [*(line.label for line in lines), *references]), default=0)
        figure = Figure(figsize=(4.6 + 0.08 * longest, 3.6), layout="constrained")
        axes = figure.subplots()
        for label, loss in references.items():
            axes.axhline(loss, label=f"{label} {loss:z.3f}", zorder=1, color=_QUIET, linestyle="--")
        right = axes.twinx() if any(line.accuracy for line in lines) else None
        for line, marker in zip(lines, itertools.cycle(_MARKERS), strict=False):
            style = "--" if line.colour == _TRAINING else "-"
            label = f"{line.label} {line.losses[-1]:.3f}"
            drawn: dict[str, Any] = {"marker": marker, "markersize": 4, "linestyle": style}
            axes.plot(line.x, line.losses, label=label, color=line.colour, **drawn)
            if line.band:
                low, high = zip(*line.band, strict=True)
                axes.fill_between(line.x, low, high, color=line.colour, alpha=0.2, linewidth=0)
            if right is not None and line.accuracy:
                right.plot(line.x, line.accuracy, color=line.colour, linestyle=":")
                right.set_ylim(0, 1.02)
                right.yaxis.set_major_formatter(PercentFormatter(1))
                right.set_ylabel("right answers (dotted)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0 if right is None else 1.16, 0.5))
        axes.set_ylabel("loss, nats per token")
        axes.set_xlabel(x_label)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        file = io.BytesIO()
        figure.savefig(file, format=format, dpi=120)
    return file.getvalue()


def verdict(run: Run, result: Result) -> str:
    """Return a sentence on whether the validation loss still falls, has levelled off, or rises."""
    records, dataset = result.records, run.dataset
    tokens = records[-1].evaluated_tokens or math.inf
    accuracy = records[-1].accuracy
    words = [] if accuracy is None else [f"{accuracy:.1%} of answers right at the last step"]
    bigram_loss = dataset.bigram_loss if run.config.spec.name == "bigram" else None
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
    if records[best].step == 0:
        return "nothing was learned: no later loss is below that of step 0"
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
