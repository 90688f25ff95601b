"""A training whose attention saturates, with subnormal numbers flushed to zero and without."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnlm.compute.threads import torch_settings_restored
from attnlm.data.dataset import Dataset
from benchmarks.nanogpt import Shape
from benchmarks.table import Row
from benchmarks.transformer import ROUNDS, Ours

SHAPE = Shape(4, 128, 4, 64, 12)
STEPS, TIMED = 200, 40
RATE = 0.02


class Training(NamedTuple):
    """Tokens per second of the first and the last steps, and the share of subnormal gradients."""

    first: float
    last: float
    subnormal: float

    @property
    def kept(self) -> float:
        return self.last / self.first


def subnormals(dataset: Dataset, text: Path) -> list[Row]:
    """Speed of the last steps, compared with the first steps of the same training."""
    pairs = [
        (_trained(dataset, torch_settings_restored), _trained(dataset, contextlib.nullcontext))
        for _ in range(ROUNDS)
    ]
    ours, rivals = zip(*pairs, strict=True)
    faster = statistics.median(one.last / other.last for one, other in pairs)
    return [
        Row(
            f"gpt2, {SHAPE}, rate {RATE}: last {TIMED} of {STEPS} steps / first {TIMED}",
            _described(ours),
            f"without flushing {_described(rivals)}",
            f"{faster:.2f}",
        )
    ]


def _described(trainings: tuple[Training, ...]) -> str:
    kept, last, share = (
        statistics.median(found)
        for found in zip(*((t.kept, t.last, t.subnormal) for t in trainings), strict=True)
    )
    return f"{kept:.2f} ({last:,.0f} tokens/s at last, {share:.0%} of gradients subnormal)"


def _trained(
    dataset: Dataset, mode: Callable[[], contextlib.AbstractContextManager[None]]
) -> Training:
    with mode():
        ours = Ours("gpt2", SHAPE, dataset, learning_rate=RATE)
        first = _speed(ours, TIMED)
        with _counting(ours) as shares:
            _speed(ours, STEPS - 2 * TIMED)
        return Training(first, _speed(ours, TIMED), statistics.mean(shares))


def _speed(ours: Ours, steps: int) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    for _ in range(steps):
        ours.stepper.step()
    return steps * SHAPE.batch * SHAPE.context / (time.perf_counter() - began)


@contextlib.contextmanager
def _counting(ours: Ours) -> Iterator[list[float]]:
    """Collect the share of subnormal numbers in the gradient of each step."""
    optimizer = ours.stepper.state.optimizer
    update = optimizer.update
    shares: list[float] = []

    def counting(*arguments: Any, **options: Any) -> None:
        # A comparison would take subnormal numbers for zeros where they are flushed.
        bits = optimizer.gradient.view(torch.int32) & 0x7FFFFFFF
        shares.append(((bits > 0) & (bits < 0x00800000)).double().mean().item())
        update(*arguments, **options)

    optimizer.update = counting  # type: ignore[method-assign]
    try:
        yield shares
    finally:
        optimizer.update = update  # type: ignore[method-assign]
