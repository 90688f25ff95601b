"""Training with own code: resuming, dropout, buffers, several processes, losses of one's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from tests import own_code
from tests.kit import command
from tests.models import assert_same_run, timeless
from tests.processes import commands

PART = {"embed_dim": 8, "heads": 2}


@pytest.fixture
def trained(code: Path, dataset: Dataset, tmp_path: Path) -> Any:
    """Return a function that trains with SMALL, and settings that name own code as parts:NAME."""

    def train(**settings: Any) -> Run:
        named = {
            k: f"{code / v.replace(':', '.py:')}" if str(v).startswith(("parts:", "models:")) else v
            for k, v in settings.items()
        }
        folder = tmp_path / "checkpoints"
        return attnlm.train(dataset.path, checkpoint_dir=folder, **own_code.SMALL | named)

    return train


def stop_after(step: int) -> Any:
    def on_step(made: int, loss: Tensor) -> None:
        if made == step:
            raise KeyboardInterrupt

    return on_step


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "parts:Head", "set": {"dropout": 0.3}, **PART},
        {"attention": "parts:Head", "set": {"dropout": 0.3}, "threads": 2, **PART},
        {
            "model": "transformer",
            "attention": "parts:Head",
            "mlp": "parts:Gate",
            "set": {"dropout": 0.3},
            "dropout": 0.2,
            "layers": 2,
            **PART,
        },
        {"model": "models:Recurrent", "micro_batch_size": 2},
        {"model": "models:lecture", "optimizer": "adamw"},
    ],
    ids=["part", "two threads", "two parts", "recurrent", "model"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    settings: dict[str, Any], trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(**settings, steps=6, name="whole")
    with pytest.raises(KeyboardInterrupt):
        trained(**settings, steps=6, name="stopped", on_step=stop_after(3))
    own_code.become_a_new_process(monkeypatch)
    torch.manual_seed(7)  # a new process may have drawn other numbers
    resumed = attnlm.train(resume=tmp_path / "checkpoints/stopped")
    assert_same_run(whole, resumed)
    (text,) = attnlm.samples(resumed, num_samples=1, tokens=20, seed=1)
    assert text == attnlm.samples(whole, num_samples=1, tokens=20, seed=1)[0] and len(text) == 20
    assert attnlm.evaluate(whole, checkpoint="last").loss == whole.metrics()[-1]["val_loss"]


def test_dropout_in_own_code_changes_the_training(trained: Any) -> None:
    losses = [
        trained(attention="parts:Head", set={"dropout": p}, **PART).metrics()[-1]["val_loss"]
        for p in (0.0, 0.5)
    ]
    assert losses[0] != losses[1]


KEPT = """
class Kept(Head):
    '''With buffers that training changes or that are drawn, and a frozen drawn parameter.'''

    def __init__(self, embed_dim, heads, block_size):
        super().__init__(embed_dim, heads, block_size)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("order", torch.randperm(embed_dim))
        self.register_buffer("blind", torch.full((block_size, block_size), -torch.inf).triu(1))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.randn(3)))
        self.register_buffer("coins", torch.rand(3) < 0.5)
        self.fixed.data.uniform_()

    def forward(self, x):
        if self.training:
            self.seen = self.seen + x.detach().mean()
            self.steps += 1
        turned = torch.view_as_real(self.turns).sum()
        return super().forward(x)[..., self.order] + self.seen.sum() + self.steps + turned
"""


@pytest.fixture
def kept(tmp_path: Path) -> str:
    (tmp_path / "kept.py").write_text(own_code.PARTS + KEPT)
    return f"{tmp_path}/kept.py:Kept"


def test_buffers_and_frozen_parameters_survive(trained: Any, kept: str) -> None:
    run = trained(attention=kept, **PART)
    model: Any = run.model(checkpoint="last")
    part = model.blocks[0].attention.module
    assert part.seen.abs().sum() > 0 and part.steps == 4
    assert part.order.sort().values.equal(torch.arange(8))
    assert part.mask.equal(torch.ones(12, 12).tril()) and part.coins.dtype == torch.bool
    assert part.blind.isneginf().sum() == 66
    assert run.parameters == sum(p.numel() for p in model.parameters())
    assert attnlm.evaluate(run, checkpoint="last").loss == run.metrics()[-1]["val_loss"]
    again: Any = attnlm.train(resume=run.path, steps=8).model(checkpoint="last")
    later = again.blocks[0].attention.module
    assert later.steps == 8 and not later.seen.equal(part.seen)
    for name in ("order", "turns", "fixed"):
        assert getattr(later, name).equal(getattr(part, name))


def test_buffers_are_resumed(trained: Any, kept: str, tmp_path: Path) -> None:
    whole = trained(attention=kept, **PART, name="whole", threads=2)
    with pytest.raises(KeyboardInterrupt):
        trained(attention=kept, **PART, name="stopped", threads=2, on_step=stop_after(3))
    assert_same_run(whole, attnlm.train(resume=tmp_path / "checkpoints/stopped"))


def test_tied_weights_stay_tied(trained: Any) -> None:
    run = trained(model="models:Logits")
    tied: Any = run.model(checkpoint="last").module
    assert tied.head.weight is tied.table.weight
    assert run.parameters == 12 * run.vocab_size + 12 * 12 + 12 * 12 + 12


@pytest.mark.parametrize("made", ["torch.ones(8).double()", "torch.ones(8).bfloat16()"])
def test_parameters_of_other_types_are_refused(trained: Any, tmp_path: Path, made: str) -> None:
    content = f"""
class Other(Gate):
    def __init__(self, embed_dim):
        super().__init__(embed_dim)
        self.gain = nn.Parameter({made})
"""
    (tmp_path / "other.py").write_text(own_code.PARTS + content)
    with pytest.raises(AttnlmError, match=r"other.py:Other: the parameter gain is of type torch"):
        trained(attention=f"{tmp_path}/other.py:Other", embed_dim=8)


def test_muon_and_a_recurrent_model_learn(trained: Any) -> None:
    run = trained(model="models:Recurrent", steps=60, eval_every=30)
    assert run.config.training.optimizer == "muon"
    first, *_, last = (record["val_loss"] for record in run.metrics())
    assert last < first - 0.3


def test_a_loss_of_ones_own_trains_and_cross_entropy_validates(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(model="bigram", name="plain")
    soft = trained(model="bigram", loss="parts:soft", name="soft")
    assert soft.config.settings()["loss"] == "parts.py:soft"
    one, other = (run.metrics() for run in (plain, soft))
    assert one[0]["val_loss"] == other[0]["val_loss"]
    assert one[-1]["val_loss"] != other[-1]["val_loss"]
    assert attnlm.evaluate(soft, checkpoint="last").loss == other[-1]["val_loss"]
    with pytest.raises(KeyboardInterrupt):
        trained(model="bigram", loss="parts:soft", name="stopped", on_step=stop_after(3))
    own_code.become_a_new_process(monkeypatch)
    assert_same_run(soft, attnlm.train(resume=tmp_path / "checkpoints/stopped"))


def smoothed(logits: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def test_a_loss_is_passed_as_a_function_too(trained: Any) -> None:
    losses = [
        trained(model="transformer", layers=1, loss=loss, **PART).metrics()[-1]["train_loss"]
        for loss in (smoothed, "parts:soft")
    ]
    assert losses[0] == losses[1]
    with pytest.raises(UsageError, match="is not a class or function"):
        trained(model="bigram", loss=math.log)
    with pytest.raises(UsageError, match="`loss` 'soft' is not code"):
        trained(model="bigram", loss="soft")


def test_a_loss_that_is_not_a_number_is_refused(trained: Any, tmp_path: Path) -> None:
    (tmp_path / "l.py").write_text("def loss(logits, ids, targets):\n    return logits.mean(-1)\n")
    with pytest.raises(AttnlmError, match=r"l.py:loss returns \(4, 12\), and the model needs \(\)"):
        trained(model="bigram", loss=f"{tmp_path}/l.py:loss", name="wrong")


def test_two_processes_train_own_code_as_one_does(
    project: Path, code: Path, tmp_path: Path
) -> None:
    about = ("--attention", f"{code}/parts.py:Head", "--heads=2", "--embed-dim=8")
    sizes = [f"--{n.replace('_', '-')}={v}" for n, v in own_code.SMALL.items()]
    words = ("train", "fruits-char", *about, *sizes)
    two = (*words, "--name", "two", "--processes", "2")
    commands(project, tmp_path, 0, two, two)
    command(*words, "--name", "one", cwd=project)
    one, both = (timeless(project / "checkpoints" / name) for name in ("one", "two"))
    for alone, together in zip(one, both, strict=True):
        np.testing.assert_allclose(together["val_loss"], alone["val_loss"], 1e-5)
    resume = ("train", "--resume", "two", "--steps", "6")
    (tmp_path / "more").mkdir()
    commands(project, tmp_path / "more", 0, resume, resume)
    assert timeless(project / "checkpoints/two")[-1]["step"] == 6


def test_the_weights_of_own_code_start_a_new_run(trained: Any, dataset: Dataset) -> None:
    parent = trained(attention="parts:Head", set={"start": 2}, **PART)
    run = attnlm.train(
        dataset.path, start_from=parent, steps=2, checkpoint_dir=parent.path.parent, name="child"
    )
    assert run.config.settings()["set.start"] == 2.0
    first = run.metrics()[0]["val_loss"]
    assert first == pytest.approx(parent.checkpoint("best").val_loss, abs=1e-5)
    with pytest.raises(UsageError, match=r"`set.start` cannot be changed"):
        attnlm.train(dataset.path, start_from=parent, set={"start": 3})


def test_an_exist_ok_run_is_found_again(trained: Any, code: Path, tmp_path: Path) -> None:
    run = trained(attention="parts:Head", name="same", **PART)
    again = trained(attention="parts:Head", name="same", exist_ok=True, **PART)
    assert again.path == run.path
    changed = tmp_path / "parts.py"
    changed.write_text(own_code.PARTS + "# changed\n")
    with pytest.raises(AttnlmError, match="same exists, but its `code` differs"):
        trained(attention=f"{changed}:Head", name="same", exist_ok=True, **PART)
