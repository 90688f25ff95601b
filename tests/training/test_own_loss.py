"""An own loss whose batch may not be divided, or that draws: the machine chooses no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.events import Note
from attnlm.data.dataset import Dataset
from tests import own_code

LOSSES = {
    "weighted": "return F.cross_entropy(l.mT, t, weight=torch.arange(1.0, l.size(-1) + 1))",
    "largest": "return F.cross_entropy(l.mT, t, reduction='none').mean(1).max()",
    "root": "return F.cross_entropy(l.mT, t).sqrt()",
    "by torch": "return F.cross_entropy(l.mT, t) * (1 + torch.rand(()))",
    "by random": "return F.cross_entropy(l.mT, t) * (1 + random.random())",
    "by numpy": "return F.cross_entropy(l.mT, t) * (1 + float(np.random.rand()))",
    "mean": "return F.cross_entropy(l.mT, t) + 0.01 * l.square().mean()",
}
HEAD = """import random

import numpy as np
import torch
from torch.nn import functional as F

def loss(l, ids, t):
    """


def _trained(name: str, dataset: Dataset, folder: Path, **settings: Any) -> tuple[Any, list[str]]:
    file = folder / "mine.py"
    file.write_text(f"{HEAD}{LOSSES[name]}\n")
    notes: list[str] = []
    run = attnlm.train(
        dataset,
        checkpoint_dir=folder / "checkpoints",
        on_event=lambda event: notes.append(str(event)) if isinstance(event, Note) else None,
        **{**own_code.SMALL, "model": "average", "loss": f"{file}:loss", **settings},
    )
    return [record["val_loss"] for record in run.metrics()], notes


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"mean"}))
def test_threads_and_micro_batches_do_not_change_an_own_loss(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    losses, notes = _trained(name, dataset, tmp_path)
    is_divided = name.startswith("by")
    assert any("is not the mean of its parts" in note for note in notes) != is_divided
    assert _trained(name, dataset, tmp_path, threads=2)[0] == losses
    if not is_divided:
        assert _trained(name, dataset, tmp_path, micro_batch_size=1)[0] == losses


def test_a_mean_over_windows_is_divided(dataset: Dataset, tmp_path: Path) -> None:
    losses, notes = _trained("mean", dataset, tmp_path)
    assert not any("mean of its parts" in note for note in notes)
    divided = _trained("mean", dataset, tmp_path, micro_batch_size=1)[0]
    assert divided == pytest.approx(losses, abs=1e-6)
