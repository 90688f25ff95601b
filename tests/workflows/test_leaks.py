"""`check` finds leaks that only training has, and small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve_new
from attnlm.data.dataset import Dataset
from attnlm.training.own_code_trial import find_leak
from attnlm.workflows.check_own_code import check_causal
from tests.own_code import SMALL

BODIES = {
    "batch norm": ("self.norm(x.mT).mT", "LayerNorm"),
    "in training alone": ("x + 0.1 * self.training * torch.roll(x, -1, 1)", "in training"),
    "small": ("x + 1e-4 * torch.roll(x, -1, 1)", "mask"),
    "causal": ("x + torch.roll(x, 1, 1) * (torch.arange(x.size(1)) > 0)[:, None]", ""),
    "noise": ("x + 0.1 * torch.randn(x.size(1), 1)", ""),
    "noise of its own": ("x + self.training * random.random()", ""),
    "a count": ("x + self.training * next(counts)", ""),
}
SOURCE = """import itertools
import random

import torch
from torch import nn

counts = itertools.count()


class Mlp(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.norm = nn.BatchNorm1d(embed_dim)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("same", self.count)

    def forward(self, x):
        return BODY
"""


@pytest.mark.parametrize("name", BODIES)
def test_leaks_of_training_and_small_leaks_are_found(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    body, cause = BODIES[name]
    (tmp_path / "mine.py").write_text(SOURCE.replace("BODY", body))
    code = f"{tmp_path / 'mine.py'}:Mlp"
    settings: Settings = {"model": "transformer", "mlp": code, "dropout": 0.2}
    leaks = check_causal(resolve_new(settings, None).config, dataset.vocab_size)
    assert bool(leaks) == bool(cause) and cause in leaks


def test_check_and_train_say_what_leaks_in_training(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.replace("BODY", BODIES["batch norm"][0]))
    code = f"{tmp_path / 'mine.py'}:Mlp"
    findings = {f.name: f for f in attnlm.check(code, part="mlp", model="transformer")}
    assert findings["causality"].is_fatal and "in training" in findings["causality"].text
    with pytest.raises(AttnlmError, match="in training, the logits") as caught:
        attnlm.train(dataset, model="transformer", mlp=code, checkpoint_dir=tmp_path, **SMALL)
    assert "LayerNorm" in caught.value.hint


def test_a_ladder_looks_for_leaks_before_its_first_rung_trains(
    dataset: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.replace("BODY", BODIES["small"][0]))
    rungs = ["bigram", f"transformer:mlp={tmp_path / 'mine.py'}:Mlp"]
    with pytest.raises(AttnlmError, match="is not causal") as caught:
        attnlm.ladder(dataset, rungs=rungs, steps=2, checkpoint_dir=tmp_path / "checkpoints")
    assert "force" not in caught.value.hint
    assert not (tmp_path / "checkpoints").exists()


def test_shared_buffers_stay_shared(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.replace("BODY", "x + self.count.add_(1) + self.same"))
    settings: Settings = {"model": "transformer", "mlp": f"{tmp_path / 'mine.py'}:Mlp"}
    config = resolve_new(settings, None).config
    model: Any = config.spec.build(7).eval()
    assert not find_leak(config, model, torch.arange(5)[None], 5)
    assert model.blocks[0].mlp.module.count is model.blocks[0].mlp.module.same
    assert model.blocks[0].mlp.module.same == 0
