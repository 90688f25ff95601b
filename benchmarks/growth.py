"""Measure how the cost per token grows with width, depth, context and batch, against nanoGPT."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.figure import Figure

from attnlm.data.dataset import Dataset
from benchmarks.nanogpt import Rival, Shape
from benchmarks.table import Row, in_turn
from benchmarks.transformer import Ours

BASE = Shape(layers=4, width=128, heads=4, context=256, batch=4)
AXES: dict[str, tuple[int, ...]] = {
    "width": (64, 128, 256, 512),
    "layers": (1, 2, 4, 8),
    "context": (64, 256, 1024, 4096),
    "batch": (1, 4, 16, 64),
}
_SECONDS, _ROUNDS = 1.0, 3


def growth(dataset: Dataset, text: Path) -> list[Row]:
    """Return a row for each point; GROWTH names the picture to draw."""
    folder = os.environ.get("NANOGPT")
    if folder is None:
        return [Row("growth", "", "nanoGPT: NANOGPT is not set", "–")]
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    rows = []
    for panel, (axis, sizes) in zip(panels, AXES.items(), strict=True):
        points = []
        for size in sizes:
            shape = BASE._replace(**{axis: size})
            if axis == "context":
                shape = shape._replace(batch=max(1, BASE.batch * BASE.context // size))
            ours = Ours("gpt2", shape, dataset)
            rival = Rival(Path(folder), shape)
            own, other, ratio = in_turn(
                lambda ours=ours: ours.tokens_per_second(_SECONDS),  # type: ignore[misc]
                lambda rival=rival: rival.tokens_per_second(_SECONDS),  # type: ignore[misc]
                _ROUNDS,
            )
            points.append((size, 1e6 / own, 1e6 / other))
            name = f"gpt2, {shape}: µs per token"
            rows.append(Row(name, f"{1e6 / own:.1f}", f"nanoGPT {1e6 / other:.1f}", f"{ratio:.2f}"))
        for column, (label, style) in enumerate((("attnlm", "o-"), ("nanoGPT", "s--")), 1):
            panel.plot([p[0] for p in points], [p[column] for p in points], style, label=label)
        panel.set(xscale="log", yscale="log", xlabel=axis, xticks=sizes, xticklabels=sizes)
        panel.minorticks_off()
    panels[0].set_ylabel("µs per token of a step")
    panels[0].legend(frameon=False)
    figure.savefig(os.environ.get("GROWTH", "build/growth.png"), dpi=110)
    return rows
