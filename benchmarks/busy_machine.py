"""Measure how much slower training is on a busy machine than on an idle one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from attnlm.base.setting_fields import Settings
from attnlm.compute.device import choose_device
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import RUNGS
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from attnlm.workflows.autotune import autotune
from benchmarks import plain
from benchmarks.table import Row

RECIPES = ("shakespeare-fast", "shakespeare-best")
SECONDS = float(os.environ.get("SECONDS_A_ROUND", 5))


def busy(dataset: Dataset, text: Path) -> list[Row]:
    """Every rung's defaults and both Shakespeare recipes, and the plain loop."""
    data, _, vocab_size = plain.encode(text.read_text(encoding="utf-8"))
    model = plain.PlainModel(vocab_size, 32, 4, 32)

    def plain_steps() -> float:
        torch.set_num_threads(os.cpu_count() or 1)
        return plain.train(model, data, 100, batch_size=16)

    loop = " and ".join(f"{slower:.1f}" for slower in _slowdowns(plain_steps))
    rows = []
    for name in (*RUNGS, *RECIPES):
        settings: Settings = {"seed": 1} if name in RECIPES else {"seed": 1, "model": name}
        config = resolve(settings, load_recipe(name) if name in RECIPES else None)
        torch.set_num_threads(os.cpu_count() or 1)
        device = choose_device("cpu")
        config = autotune(config, device, dataset)
        stepper = Stepper(initial_state(config, dataset.vocab_size, device), config, dataset)

        def steps(stepper: Stepper = stepper) -> float:
            return _speed(stepper)

        one, two = _slowdowns(steps)
        rows.append(
            Row(
                f"{name}: slower beside 1 and 2 busy processes by",
                f"{one:.1f} and {two:.1f} (threads: {config.training.threads})",
                f"plain loop {loop}",
                "–",
            )
        )
    return rows


def _slowdowns(speed: Callable[[], float]) -> tuple[float, float]:
    """Return the speed relative to idle with one and two busy processes, best of two rounds."""
    idle = max(speed(), speed())
    found = []
    for count in (1, 2):
        with _others(count):
            found.append(idle / max(speed(), speed()))
    return found[0], found[1]


@contextlib.contextmanager
def _others(count: int) -> Iterator[None]:
    loop = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(count)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _speed(stepper: Stepper) -> float:
    began, made = time.perf_counter(), 0
    while made < 1 or time.perf_counter() - began < SECONDS:
        stepper.step()
        made += 1
    return made / (time.perf_counter() - began)
