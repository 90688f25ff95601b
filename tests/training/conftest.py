"""What tests of training share: a training on the small data set, and how it is stopped."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlm.data.dataset import Dataset
from attnlm.training.events import Evaluated
from tests.kit import quick_run


@pytest.fixture
def train(dataset: Dataset, tmp_path: Path) -> Any:
    """Return a function that trains on the small data set; runs lie in tmp_path/checkpoints."""
    place: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoints", "device": "cpu"}
    return functools.partial(quick_run, dataset, eval_every=2, **place)


@pytest.fixture
def head(code: Path) -> dict[str, Any]:
    """Settings of a rung whose attention is a user's own."""
    return {"attention": f"{code}/parts.py:Head", "embed_dim": 8, "heads": 2}


def signal_after_step(step: int, signum: signal.Signals = signal.SIGINT) -> dict[str, Any]:
    """Arguments of a training that gets a signal after a step, before its evaluation, if any."""

    def on_step(made: int, loss: torch.Tensor) -> None:
        if made == step:
            signal.raise_signal(signum)

    return {"on_step": on_step}


def signal_after_evaluation(step: int) -> dict[str, Any]:
    """Arguments of a training that gets a signal once the evaluation at a step is reported."""

    def on_event(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == step:
            signal.raise_signal(signal.SIGINT)

    return {"on_event": on_event}
