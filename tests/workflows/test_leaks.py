"""`check` finds leaks that only training has, and small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.config.settings import Config, resolve_new
from attnlm.data.dataset import Dataset
from attnlm.training.own_code_trial import find_leak
from attnlm.workflows.check_own_code import REQUIRED, NotCausalError
from tests.own_code import SMALL

BODIES = {
    "batch norm": ("self.norm(x.mT).mT", "LayerNorm"),
    "in training alone": ("x + 0.1 * self.training * torch.roll(x, -1, 1)", "in training"),
    "small": ("x + 1e-4 * torch.roll(x, -1, 1)", "mask"),
    "even tokens": ("x + later(x) * (torch.arange(T) % 2)[:, None]", "mask"),
    "one token": ("x + later(x) * (torch.arange(T) == 12)[:, None]", "mask"),
    "every fourth": ("x + x[:, ::4].sum(1, keepdim=True)", "mask"),
    "pairs": ("x + later(x[:, ::2]).repeat_interleave(2, 1)[:, :T]", "mask"),
    "one for all": ("x + x[:, min(2, T - 1)][:, None]", "mask"),
    "beyond 64 tokens": ("x + later(x) * (T > 64)", "mask"),
    "chunks": ("x + (torch.arange(T) % 128 == 126)[:, None] * later(x)", "mask"),
    "the largest": ("x + x.gather(1, x.argmax(1, keepdim=True))", "mask"),
    "the best two": ("x + x.topk(2, dim=1).values.mean(1, keepdim=True)", "mask"),
    "drawn by random": ("x + later(x) * random.gauss(1, 0.1)", "mask"),
    "drawn by NumPy": ("x + later(x) * float(1 + 0.1 * np.random.randn())", "mask"),
    "counted": ("x + later(x) * self.counted()", "mask"),
    "noise for each token": ("x + later(x) + torch.randn_like(x)", "mask"),
    "other texts": ("x + later(x) - x.mean(0)", "mask"),
    "causal": ("x + torch.roll(x, 1, 1) * (torch.arange(T) > 0)[:, None]", ""),
    "noise": ("x + 0.1 * torch.randn(T, 1)", ""),
    "noise for each text": ("x + 0.1 * torch.randn_like(x)", ""),
    "drawn": ("x + self.training * random.random() + float(np.random.randn())", ""),
    "layer drop": ("x * 0 if self.training and random.random() < 0.3 else x", ""),
    "count in a buffer": ("x + self.count.add_(1) + self.same", ""),
    "count in an attribute": ("x + self.counted()", ""),
    "mean of other texts": ("x - x.mean(0)", ""),
    "from the end": ("x.sum(1, keepdim=True) - x.flip(1).cumsum(1).flip(1) + x", ""),
    "scaled by all": ("(a := (x - x.amax(1, keepdim=True)).exp()).cumsum(1).log() - a.log()", ""),
    "fast convolution": (
        "torch.fft.irfft(torch.fft.rfft(x, 2 * T, 1) * torch.fft.rfft(x.new_ones(T, 1) / T, "
        "2 * T, 0), 2 * T, 1)[:, :T]",
        "",
    ),
}
UNKNOWN = {
    "a generator of its own": "x + self.training * own.random()",
    "a count of the file": "x + later(x) * next(counts)",
    "NaN in training": "x / (1 - self.training) * 0",
    "NaN of a module that is not registered": "nn.Identity()(x * float('nan'))",
}
SOURCE = """import itertools
import random

import numpy as np
import torch
from torch import nn

counts = itertools.count()
own = random.Random(0)


def later(x):
    return torch.cat([x[:, 1:], x[:, :1] * 0], 1)


class Mlp(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.norm = nn.BatchNorm1d(embed_dim)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("same", self.count)
        self.calls = 0

    def counted(self):
        self.calls += 1
        return self.calls

    def forward(self, x):
        T = x.size(1)
        return BODY
"""


def config_with(body: str, folder: Path, **settings: Any) -> Config:
    (folder / "mine.py").write_text(SOURCE.replace("BODY", body))
    settings = {"model": "transformer", "attention": f"{folder / 'mine.py'}:Mlp", **settings}
    return resolve_new(settings, None).config


@pytest.mark.parametrize("name", BODIES)
def test_leaks_of_training_and_small_leaks_are_found(name: str, tmp_path: Path) -> None:
    body, cause = BODIES[name]
    length = 256 if name in ("chunks", "beyond 64 tokens", "fast convolution") else 64
    config = config_with(body, tmp_path, dropout=0.2, block_size=length)
    leaks = ""
    try:
        REQUIRED["causality"](config, config.spec.build(65).eval())
    except NotCausalError as error:
        leaks = f"{error.message} {error.hint}"
    assert bool(leaks) == bool(cause) and cause in leaks


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_never_reads_as_fine(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    config = config_with(UNKNOWN[name], tmp_path)
    code = f"{config.codes[0].path}:Mlp"
    with pytest.raises(AttnlmError, match="whether it sees later tokens is unknown"):
        attnlm.train(dataset, attention=code, checkpoint_dir=tmp_path, **SMALL)
    findings = {f.name: f for f in attnlm.check(code, part="attention")}
    assert findings["causality"].is_fatal and "is unknown" in findings["causality"].text


def test_a_rung_that_turns_out_not_to_be_causal_fails_alone(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.replace("BODY", BODIES["small"][0]))
    rungs = ["bigram", f"transformer:mlp={tmp_path / 'mine.py'}:Mlp"]
    monkeypatch.setattr("attnlm.workflows.ladder.check_required", lambda *_: "")
    said: list[str] = []
    attnlm.ladder(
        dataset,
        rungs=rungs,
        steps=2,
        checkpoint_dir=tmp_path,
        on_event=lambda event: said.append(str(event)),
    )
    assert any(f"{rungs[1]} failed: transformer" in line for line in said)
    assert not any("force" in line for line in said)


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
    config = config_with("x + self.count.add_(1) + self.same", tmp_path, block_size=5)
    model: Any = config.spec.build(7).eval()
    assert not find_leak(model, 4)
    assert model.blocks[0].attention.module.count is model.blocks[0].attention.module.same
    assert model.blocks[0].attention.module.same == 0


@pytest.mark.parametrize("stride", [2, 8])
def test_a_search_among_some_tokens_leaves_no_residue_out(stride: int, tmp_path: Path) -> None:
    for rest in range(stride):
        body = f"x + later(x) * (torch.arange(T) % {stride} == {rest})[:, None]"
        config = config_with(body, tmp_path, block_size=256)
        assert find_leak(config.spec.build(65).eval(), 64)
