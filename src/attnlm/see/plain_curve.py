"""A run's loss curve in plain characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def plain_curve(
    records: Sequence[Mapping[str, Any]],
    known: Mapping[str, float],
    *,
    width: int = 56,
    height: int = 9,
) -> str:
    """The validation loss by step in plain characters, with the known losses as dashed lines.

    Empty where there are fewer than two evaluations.
    """
    steps = [int(record["step"]) for record in records]
    losses = [float(record["val_loss"]) for record in records]
    if len(steps) < 2 or steps[0] == steps[-1]:
        return ""
    low, high = min([*losses, *known.values()]), max([*losses, *known.values()])

    def row(loss: float) -> int:
        return round((high - loss) / ((high - low) or 1) * (height - 1))

    rows = [[" "] * width for _ in range(height)]
    names = [""] * height
    for label, loss in known.items():
        rows[row(loss)] = ["-" if column % 2 else " " for column in range(width)]
        names[row(loss)] = f" {label} {loss:z.2f}"
    for column in range(width):
        step = steps[0] + (steps[-1] - steps[0]) * column / (width - 1)
        rows[row(_between(steps, losses, step))][column] = "*"
    axis = [f"{high - (high - low) * number / (height - 1):z6.2f} |" for number in range(height)]
    lines = [
        f"{mark}{''.join(cells)}{name}" for mark, cells, name in zip(axis, rows, names, strict=True)
    ]
    ends = f"{steps[0]:,}", f"step {steps[-1]:,}"
    return "\n".join(
        [*(line.rstrip() for line in lines), f"{'':8}{ends[0]}{ends[1]:>{width - len(ends[0])}}"]
    )


def _between(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The value at `at` on straight lines from point to point; `x` ascends."""
    for (x0, y0), (x1, y1) in zip(
        zip(x, y, strict=True), zip(x[1:], y[1:], strict=True), strict=False
    ):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return y[-1]
