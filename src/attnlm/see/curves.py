"""Loss curves: `curve.png` of a run while it trains, and several runs on one pair of axes.
matplotlib is imported when something is drawn, not before."""

from __future__ import annotations

import gc
import io
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlm.base import files
from attnlm.base.events import Note, OnEvent
from attnlm.runs.run import Run
from attnlm.see.drawing import drawing
from attnlm.see.verdict import best_record, verdict_of
from attnlm.training.events import Evaluated, Finished, Started

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET = "#2b2f36", "#7d838d"
# Apart for the colour-blind and in greyscale too; the training loss is dashed, with squares.
_TRAINING, _VALIDATION = "#b85c00", "#0a4a8a"
# Inches: a panel, its numbers to the left, its names to the right, and a character of these.
_PANEL = 4.9, 3.4
_LEFT, _RIGHT, _GAP, _CHARACTER = 0.64, 1.72, 0.12, 0.08
# Names of page.css, which has one colour for a light page and one for a dark.
_IN_A_PAGE = {
    INK: "currentColor",
    QUIET: "var(--quiet)",
    _TRAINING: "var(--training)",
    _VALIDATION: "var(--validation)",
}

_SECONDS_BETWEEN_DRAWINGS = 5.0
# While training goes on, drawing takes at most this share of the time.
_DRAWING_SHARE = 0.02


@dataclass(frozen=True)
class Line:
    """One curve: losses in nats per token over steps, tokens or seconds."""

    label: str
    x: Sequence[float]
    losses: Sequence[float]
    colour: str
    dashed: bool = False


def run_lines(records: Sequence[Mapping[str, Any]]) -> list[Line]:
    """A run's validation and training loss by step."""
    trained = [record for record in records if record["train_loss"] is not None]
    lines = [
        Line("validation", *_points(records, "step", "val_loss"), _VALIDATION),
        Line("training", *_points(trained, "step", "train_loss"), _TRAINING, dashed=True),
    ]
    return [line for line in lines if line.x]


class CurveDrawer:
    """Listens to training and keeps the run's curve.png, then tells `on_event` of the same.

    It draws at evaluations, every few seconds at most, and at the end. Where that fails, one Note
    says so and the run goes on without.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._run: Run | None = None
        self._due = time.perf_counter() + _SECONDS_BETWEEN_DRAWINGS

    def __call__(self, event: object) -> None:
        self._on_event(event)
        if isinstance(event, Started):
            self._run = event.run
        elif isinstance(event, Finished) or self._is_due(event):
            self._draw()

    def _is_due(self, event: object) -> bool:
        """Whether an evaluation is to be drawn; after that of the last step Finished comes."""
        return (
            isinstance(event, Evaluated)
            and time.perf_counter() >= self._due
            and self._run is not None
            and not event.is_last
        )

    def _draw(self) -> None:
        if self._run is None:
            return
        began = time.perf_counter()
        try:
            draw_run(self._run, self._run.path / "curve.png")
            # A figure's parts hold each other; left alone, thirty of them wait for a full search.
            gc.collect(1)
        except Exception as error:  # noqa: BLE001 - no picture is worth a run
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._on_event(Note(f"curve.png can't be drawn: {reason}"))
            self._run = None
        now = time.perf_counter()
        self._due = now + max(_SECONDS_BETWEEN_DRAWINGS, (now - began) / _DRAWING_SHARE)


def draw_run(run: Run, path: Path) -> None:
    """Training and validation loss by step, and how the run went, as a PNG at `path`.

    Nothing before the second evaluation: one point is no curve, and a run of a few seconds is over
    sooner than matplotlib is loaded.
    """
    records = run.metrics()
    if len(records) > 1:
        with drawing(**_STYLE):
            files.write_bytes(path, _run_png(run, records))


def _run_png(run: Run, records: Sequence[Mapping[str, Any]]) -> bytes:
    lines, known = run_lines(records), run.references()
    figure, (axes,) = _panels([(lines, known)], 7.2, 4.2, top=0.82)
    draw_losses(axes, lines, known, "step")
    if run.evaluated_part:
        axes.set_ylabel(f"loss, nats per token; validation: {run.evaluated_part}")
    best = best_record(records)
    if best is not records[-1]:
        axes.plot(
            best["step"], best["val_loss"], "o", markersize=9, color=_VALIDATION, fillstyle="none"
        )
    figure.text(0.09, 0.95, run.name, fontsize=11, fontweight="bold", color=INK, va="center")
    words = textwrap.fill(verdict_of(run, records), 92)
    figure.text(0.09, 0.915, words, fontsize=9, color=INK, va="top", linespacing=1.3)
    return _png(figure)


def draw_losses(
    axes: Axes, lines: Sequence[Line], known: Mapping[str, float], x_label: str
) -> None:
    """Curves and horizontal lines of `known` losses, each named at its right end."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    end = max((line.x[-1] for line in lines), default=0) or 1
    for loss in known.values():
        axes.axhline(loss, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for line in lines:
        axes.plot([line.x[-1], end], [line.losses[-1]] * 2, ":", color=line.colour, linewidth=0.8)
        axes.plot(
            line.x,
            line.losses,
            color=line.colour,
            linewidth=1.8,
            linestyle=(0, (2.5, 1)) if line.dashed else "-",
            marker="s" if line.dashed else "o",
            markersize=3,
            clip_on=False,
        )
    axes.set_ylabel("loss, nats per token")
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.set_xlabel(x_label)
    if x_label == "seconds" and min((line.x[-1] for line in lines), default=end) < end / 10:
        axes.set_xscale("log")
        axes.set_xlabel("seconds, logarithmic")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axes.set_xlim(right=end)
        return _name_ends(axes, lines, known)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label != "seconds"))
    short = EngFormatter(sep="") if x_label == "tokens" else StrMethodFormatter("{x:,.10g}")
    axes.xaxis.set_major_formatter(short)
    axes.set_xlim(0, end)
    return _name_ends(axes, lines, known)


def _name_ends(axes: Axes, lines: Sequence[Line], known: Mapping[str, float]) -> None:
    """Labels to the right of the axes, moved apart where they would cover each other."""
    ends = [(loss, f"{label} {loss:z.3f}", QUIET) for label, loss in known.items()]
    ends += [
        (line.losses[-1], f"{line.label} {line.losses[-1]:.3f}", line.colour) for line in lines
    ]
    ends.sort()
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    places = [(end[0] - low) / (high - low) for end in ends]
    line_height = 11 / 72 / (axes.get_position().height * axes.figure.get_figheight())  # type: ignore[union-attr]
    for place, shown, (_, label, colour) in zip(
        places, spread(places, line_height), ends, strict=True
    ):
        across: dict[str, Any] = {"transform": axes.transAxes, "color": colour, "clip_on": False}
        axes.plot([1.005, 1.025], [place, shown], linewidth=0.8, **across)
        axes.text(1.035, shown, label, fontsize=8.5, va="center", **across)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending numbers moved as little as needed to lie `gap` apart; groups keep their middle."""
    groups: list[list[float]] = []  # of numbers that touch: their sum of starts, and their count
    for place in places:
        groups.append([place, 1])
        while len(groups) > 1 and _start(groups[-1], gap) < _start(groups[-2], gap) + (
            gap * groups[-2][1]
        ):
            middle, count = groups.pop()
            before = groups[-1]
            before[0] = (before[0] * before[1] + middle * count) / (before[1] + count)
            before[1] += count
    return [
        _start(group, gap) + gap * number for group in groups for number in range(int(group[1]))
    ]


def _start(group: Sequence[float], gap: float) -> float:
    middle, count = group
    return middle - gap * (count - 1) / 2


def panels_png(panels: Mapping[str, Sequence[Line]], known: Mapping[str, float]) -> bytes:
    """Curves over tokens, seconds and so on, by the x axis's label, side by side."""
    with drawing(**_STYLE):
        drawn = [(lines, known) for lines in panels.values()]
        figure, all_axes = _panels(drawn, 5.6, 3.8, top=0.96)
        for axes, (x_label, lines) in zip(all_axes, panels.items(), strict=True):
            draw_losses(axes, lines, known, x_label)
        return _png(figure)


def panel_svg(lines: Sequence[Line], known: Mapping[str, float], x_label: str) -> str:
    """The same for one panel, as an SVG element for a page whose style gives font and ink."""
    file = io.StringIO()
    # Text stays text; the salt makes the same picture the same bytes.
    with drawing(**_STYLE, **{"svg.fonttype": "none", "svg.hashsalt": f"attnlm {x_label}"}):
        figure, (axes,) = _panels([(lines, known)], *_PANEL, top=0.96)
        draw_losses(axes, lines, known, x_label)
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    svg = file.getvalue()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # two figures in a page would repeat them
    for colour, named in _IN_A_PAGE.items():
        svg = svg.replace(colour, named)
    return svg.replace("<svg ", f'<svg role="img" aria-label="loss by {x_label}" ', 1)


def panel_sides() -> tuple[float, float]:
    """Where the axes of `panel_svg` begin and end, as shares of its width, with short names."""
    return _LEFT / _PANEL[0], 1 - _RIGHT / _PANEL[0]


def _panels(
    drawn: Sequence[tuple[Sequence[Line], Mapping[str, float]]],
    width: float,
    height: float,
    *,
    top: float,
) -> tuple[Figure, list[Axes]]:
    """Empty axes side by side; each is `width` inches wide, and wider for longer names."""
    from matplotlib.figure import Figure

    names = [name for lines, known in drawn for name in (*(line.label for line in lines), *known)]
    right = max(_RIGHT, _GAP + _CHARACTER * (len(" 1.234") + max(map(len, names), default=0)))
    width, count = width + right - _RIGHT, len(drawn)
    figure = Figure(figsize=(count * width, height))
    figure.subplots_adjust(
        left=_LEFT / (count * width),
        right=1 - right / (count * width),
        top=top,
        bottom=0.5 / height,
        wspace=(_LEFT + right) / (width - _LEFT - right),
    )
    return figure, [figure.add_subplot(1, count, 1 + number) for number in range(count)]


_STYLE: dict[str, Any] = {
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
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


def _points(
    records: Sequence[Mapping[str, Any]], x: str, y: str
) -> tuple[list[float], list[float]]:
    return [record[x] for record in records], [record[y] for record in records]
