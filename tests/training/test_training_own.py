"""Training with own code: dropout, buffers, several processes, losses of one's own.

That a resumed run equals an uninterrupted one: test_training.py.
"""

from __future__ import annotations

import contextlib
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
from tests import own_code
from tests.kit import command
from tests.models import timeless
from tests.processes import run_ranks


def test_dropout_in_own_code_changes_the_training(train: Any, head: dict[str, Any]) -> None:
    plain, dropped = (train(**head, set={"dropout": p}).metrics()[-1] for p in (0.0, 0.5))
    assert plain["val_loss"] != dropped["val_loss"]


def test_buffers_and_frozen_parameters_survive(
    train: Any, head: dict[str, Any], code: Path
) -> None:
    run = train(**head | {"attention": f"{code}/parts.py:Kept"})
    model: Any = attnlm.load_model(run, checkpoint="last", device="cpu")[0]
    part = model.blocks[0].attention.module
    assert part.seen.abs().sum() > 0 and part.steps == 4
    assert part.order.sort().values.equal(torch.arange(8))
    assert part.mask.equal(torch.ones(12, 12).tril()) and part.coins.dtype == torch.bool
    assert part.blind.isneginf().sum() == 66
    assert run.parameters == sum(p.numel() for p in model.parameters())
    longer = attnlm.train(resume=run.path, steps=8)
    again: Any = attnlm.load_model(longer, checkpoint="last", device="cpu")[0]
    later = again.blocks[0].attention.module
    assert later.steps == 8 and not later.seen.equal(part.seen)
    for name in ("order", "turns", "fixed"):
        assert getattr(later, name).equal(getattr(part, name))


def test_tied_weights_stay_tied(train: Any, code: Path) -> None:
    run = train(f"{code}/models.py:Logits")
    tied: Any = attnlm.load_model(run, checkpoint="last", device="cpu")[0].module
    assert tied.head.weight is tied.table.weight
    assert run.parameters == 12 * run.vocab_size + 12 * 12 + 12 * 12 + 12


@pytest.mark.parametrize("made", ["torch.ones(8).double()", "torch.ones(8).bfloat16()"])
def test_parameters_of_other_types_are_refused(train: Any, tmp_path: Path, made: str) -> None:
    content = f"""
class Other(Gate):
    def __init__(self, embed_dim):
        super().__init__(embed_dim)
        self.gain = nn.Parameter({made})
"""
    (tmp_path / "other.py").write_text(own_code.PARTS + content)
    with pytest.raises(AttnlmError, match=r"other.py:Other: the parameter gain is of type torch"):
        train(attention=f"{tmp_path}/other.py:Other", embed_dim=8)


@pytest.mark.parametrize("made", ["LINEAR", "linear(embed_dim)"])
def test_parameters_that_several_models_would_share_are_refused(
    train: Any, tmp_path: Path, made: str
) -> None:
    content = f"""
import functools

LINEAR = nn.Linear(8, 8)

@functools.cache
def linear(embed_dim):
    return nn.Linear(embed_dim, embed_dim)

class Shared(Gate):
    def __init__(self, embed_dim):
        super().__init__(embed_dim)
        self.linear = {made}
"""
    (tmp_path / "shared.py").write_text(own_code.PARTS + content)
    with pytest.raises(AttnlmError, match=r"linear.weight exists before the module") as caught:
        train(attention=f"{tmp_path}/shared.py:Shared", embed_dim=8)
    assert caught.value.hint == "make it in the constructor"


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_a_buffer_that_models_share_and_change_is_refused(
    train: Any, tmp_path: Path, step: float
) -> None:
    content = f"""
BUFFER = torch.zeros(8)

class Counting(Gate):
    def __init__(self, embed_dim):
        super().__init__(embed_dim)
        self.register_buffer("counted", BUFFER)

    def forward(self, x):
        self.counted += {step}
        return super().forward(x) + self.counted
"""
    (tmp_path / "counting.py").write_text(own_code.PARTS + content)
    is_refused = pytest.raises(AttnlmError, match="the buffer counted exists before the module")
    with is_refused if step else contextlib.nullcontext():
        for _ in range(2):
            train(attention=f"{tmp_path}/counting.py:Counting", embed_dim=8)


def test_variables_of_a_file_are_initialised_and_stay(train: Any, tmp_path: Path) -> None:
    content = """
ZEROS, TABLE = torch.zeros(8), nn.init.ones_(torch.full((8,), torch.nan))

class Fixed(Gate):
    def __init__(self, embed_dim, copies=False):
        super().__init__(embed_dim)
        self.bias = nn.Parameter(ZEROS.clone() if copies else ZEROS)
        self.none = nn.Parameter(torch.zeros(0, embed_dim))

    def forward(self, x):
        return super().forward(x) * TABLE + self.bias
"""
    (tmp_path / "fixed.py").write_text(own_code.PARTS + content)
    runs = [
        train(attention=f"{tmp_path}/fixed.py:Fixed", embed_dim=8, set={"copies": copies})
        for copies in (False, True)
    ]
    assert runs[0].evaluations()[-1].val_loss == runs[1].evaluations()[-1].val_loss


def test_muon_and_a_recurrent_model_learn(train: Any, code: Path) -> None:
    run = train(f"{code}/models.py:Recurrent", steps=60, eval_every=30)
    assert run.config.training.optimizer == "muon"
    first, *_, last = (record["val_loss"] for record in run.metrics())
    assert last < first - 0.3


def test_a_loss_of_ones_own_trains_and_cross_entropy_validates(train: Any, code: Path) -> None:
    plain, soft = (train("bigram", **loss) for loss in ({}, {"loss": f"{code}/parts.py:soft"}))
    assert soft.config.settings()["loss"] == "parts.py:soft"
    one, other = (run.metrics() for run in (plain, soft))
    assert one[0]["val_loss"] == other[0]["val_loss"]
    assert one[-1]["val_loss"] != other[-1]["val_loss"]
    assert attnlm.evaluate(soft, checkpoint="last").loss == other[-1]["val_loss"]


def smoothed(logits: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def test_a_loss_is_passed_as_a_function_too(train: Any, code: Path) -> None:
    by_function, by_name = (
        train("bigram", loss=loss).metrics()[-1] for loss in (smoothed, f"{code}/parts.py:soft")
    )
    assert by_function["train_loss"] == by_name["train_loss"]
    with pytest.raises(UsageError, match="is not a class or function"):
        train("bigram", loss=abs)


def test_a_loss_that_is_not_a_number_is_refused(train: Any, tmp_path: Path) -> None:
    (tmp_path / "l.py").write_text("def loss(logits, ids, targets):\n    return logits.mean(-1)\n")
    with pytest.raises(AttnlmError, match=r"l.py:loss returns \(2, 12\), and the model needs \(\)"):
        train("bigram", loss=f"{tmp_path}/l.py:loss")


def test_two_processes_train_own_code_as_one_does(
    project: Path, code: Path, tmp_path: Path
) -> None:
    about = ("--attention", f"{code}/parts.py:Head", "--heads=2", "--embed-dim=8")
    sizes = [f"--{n.replace('_', '-')}={v}" for n, v in own_code.SMALL.items()]
    words = ("train", "fruits-char", *about, *sizes)
    two = (*words, "--name", "two", "--processes", "2")
    run_ranks(project, tmp_path, 0, two, two)
    command(*words, "--name", "one", cwd=project)
    one, both = (timeless(project / "checkpoints" / name) for name in ("one", "two"))
    for alone, together in zip(one, both, strict=True):
        np.testing.assert_allclose(together["val_loss"], alone["val_loss"], 1e-5)
    resume = ("train", "--resume", "two", "--steps", "6")
    run_ranks(project, tmp_path, 0, resume, resume)
    assert timeless(project / "checkpoints/two")[-1]["step"] == 6


def test_the_weights_of_own_code_start_a_new_run(
    train: Any, head: dict[str, Any], dataset: Dataset, tmp_path: Path
) -> None:
    parent = train(**head, set={"start": 2})
    run = attnlm.train(dataset, start_from=parent, steps=2, checkpoint_dir=parent.path.parent)
    assert run.config.settings()["set.start"] == 2.0
    first = run.metrics()[0]["val_loss"]
    assert first == pytest.approx(parent.checkpoint("best").val_loss, abs=1e-5)
    about: dict[str, Any] = {"start_from": parent, "checkpoint_dir": parent.path.parent, "steps": 1}
    attnlm.train(dataset, **about, set={"start": 2}, attention=head["attention"])
    with pytest.raises(UsageError, match=r"`set.start` cannot be changed"):
        attnlm.train(dataset, **about, set={"start": 3})
    (tmp_path / "parts.py").write_text(own_code.PARTS.replace("math.sqrt(C", "math.sqrt(2 * C"))
    with pytest.raises(UsageError, match=r"`attention` cannot be changed") as refused:
        attnlm.train(dataset, **about, attention=f"{tmp_path}/parts.py:Head")
    assert "another file of this name" in refused.value.hint


def test_an_exist_ok_run_is_found_again(train: Any, head: dict[str, Any], tmp_path: Path) -> None:
    run = train(**head, name="same")
    assert train(**head, name="same", exist_ok=True).path == run.path
    (tmp_path / "parts.py").write_text(own_code.PARTS + "# changed\n")
    changed = head | {"attention": f"{tmp_path}/parts.py:Head"}
    with pytest.raises(AttnlmError, match="same exists, but its `code` differs"):
        train(**changed, name="same", exist_ok=True)
