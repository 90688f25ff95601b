"""Runs of models that were trained elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.own_code import named_code
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from tests import own_code
from tests.kit import command, quick_run


@pytest.fixture
def save(dataset: Dataset, tmp_path: Path) -> Any:
    def saved(model: nn.Module, **about: Any) -> Run:
        return attnlm.save_run(model, dataset, checkpoint_dir=tmp_path / "checkpoints", **about)

    return saved


class Written(nn.Module):
    """A model in the file of a test, as in a notebook."""

    def __init__(self, vocab_size: int, block_size: int, width: int = 6) -> None:
        super().__init__()
        self.block_size = block_size
        self.table = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids))
        return logits


def test_a_loop_of_ones_own_comes_home(save: Any, dataset: Dataset, project: Path) -> None:
    torch.manual_seed(3)
    model = Written(dataset.vocab_size, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.from_numpy(dataset.train[:193].astype("int64"))
    metrics = []
    for step in range(1, 31):
        loss = F.cross_entropy(model(ids[:-1].view(16, 12)).mT, ids[1:].view(16, 12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            metrics.append({"step": step, "train_loss": loss.item(), "val_loss": 3.0 - step / 100})
    run = save(model, name="mine", metrics=metrics)
    found = run.metrics()
    assert [(m["step"], m["train_loss"]) for m in found] == [
        (m["step"], m["train_loss"]) for m in metrics
    ]
    assert [m["val_loss"] for m in found[:2]] == [2.9, 2.8]
    assert attnlm.evaluate(run).loss == found[-1]["val_loss"] < 2.7
    assert run.checkpoint("last").step == run.checkpoint("best").step == 30
    restored: Any = attnlm.load_model(run, device="cpu")[0]
    assert restored.module.head.weight.equal(model.head.weight)
    assert model.training  # as it was
    (text,) = attnlm.samples(run, num_samples=1, tokens=10, seed=1)
    assert len(text) == 10
    about = ("--checkpoint-dir", run.path.parent)
    other = save(Written(dataset.vocab_size, 12, width=8), set={"width": 8}, name="other")
    shown = command("compare", "mine", "other", *about, cwd=project).stdout
    assert ["set.width", "6", "8"] in [line.split() for line in shown.splitlines()]
    assert other.config.settings()["block_size"] == 12
    listed = json.loads(command("list", "runs", "--json", *about, cwd=project).stdout)["runs"]
    assert {r["name"]: r["model"] for r in listed} == {"mine": "Written", "other": "Written"}
    command("report", "mine", *about, cwd=project)
    early = [{"step": 1, "val_loss": 0.1}, {"step": 2, "val_loss": 9.0}]
    result = save(model, name="early", metrics=early).result()
    assert result.best.step == 1
    assert result.final.val_loss == attnlm.evaluate(run).loss  # its checkpoints hold this model


@pytest.mark.parametrize("own", [{}, {"attention": "parts.py:Head", "set": {"start": 2}}])
def test_a_model_of_attnlm_is_saved_as_a_run(
    own: dict[str, Any], save: Any, code: Path, dataset: Dataset
) -> None:
    if own:
        own = {**own, "attention": f"{code}/{own['attention']}"}
    first = quick_run(dataset, embed_dim=8, heads=2, **own)
    model = attnlm.load_model(first, checkpoint="last", device="cpu")[0]
    kept = save(model)
    assert kept.config.spec.settings() == first.config.spec.settings()
    assert (kept.path / "code/parts.py").exists() == bool(own)
    loss = first.metrics()[-1]["val_loss"]
    assert attnlm.evaluate(kept).loss == pytest.approx(loss, abs=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert attnlm.evaluate(save(model)).loss != pytest.approx(loss, abs=1e-6)


def test_code_may_be_a_function_in_a_file(save: Any, code: Path, dataset: Dataset) -> None:
    made = named_code(f"{code}/models.py:lecture").load()(dataset.vocab_size, 9, width=5)
    about = {"code": f"{code}/models.py:lecture", "block_size": 9}
    run = save(made, **about, set={"width": 5}, name="lecture")
    assert run.config.settings()["set.width"] == 5
    assert run.metrics()[-1]["step"] == 0
    for wrong in ({"set": {"width": 6}}, {"code": f"{code}/models.py:Recurrent"}):
        with pytest.raises(AttnlmError, match="does not build the model that you trained"):
            save(made, **{**about, "set": {"width": 5}, **wrong}, name="wrong")
    with pytest.raises(UsageError, match="the context of the model is not known"):
        save(made, code=about["code"], set={"width": 5})
    assert not (run.path.parent / "wrong").exists()


def test_a_wrapper_of_pytorch_is_refused(save: Any, dataset: Dataset) -> None:
    model = Written(dataset.vocab_size, 12)
    compiled: Any = torch.compile(model, backend="eager")
    for wrapper in (compiled, nn.DataParallel(model), nn.Sequential(model)):
        with pytest.raises(
            UsageError, match=rf"{type(wrapper).__name__} is a class of PyTorch's"
        ) as e:
            save(wrapper, block_size=12)
        assert "pass the module that torch.compile or DataParallel wraps" in e.value.hint


def test_weights_that_compute_something_else_are_refused(save: Any, dataset: Dataset) -> None:
    class Changed(Written):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 2

    changed = Changed(dataset.vocab_size, 12)
    changed.table.eval()  # frozen, as in the loop of a user
    with pytest.raises(AttnlmError, match="computes something else"):
        save(changed, code=Written)
    assert changed.training and changed.head.training and not changed.table.training
    model = Written(dataset.vocab_size, 12)
    model.head.weight.data[0] = torch.nan
    with pytest.raises(AttnlmError, match="NaN or infinite"):
        save(model)


def test_a_saved_run_that_looks_ahead_is_marked(
    save: Any, dataset: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "ahead.py").write_text(
        own_code.MODELS + "class Ahead(Logits):\n"
        "    def forward(self, ids):\n"
        "        return super().forward(ids) + self.table(ids).mean(1).sum(-1)[:, None, None]"
        " * torch.arange(self.table.num_embeddings)\n"
    )
    made = named_code(f"{tmp_path}/ahead.py:Ahead").load()(dataset.vocab_size, 12)
    run = save(made, block_size=12)
    assert "when the later token" in run.leaks
    assert "not comparable" in str(run.checkpoint())


def test_what_begins_late_in_the_context_is_compared(save: Any, dataset: Dataset) -> None:
    class Late(Written):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids)
            logits[:, 10:] += (ids[:, 10:, None] > 8) * 0.1
            return logits

    with pytest.raises(AttnlmError, match="computes something else"):
        save(Late(dataset.vocab_size, 12), code=Written)


@pytest.mark.parametrize("steps", [(5, 3), (5, 5), (1, 2.5)])
def test_wrong_steps_leave_no_run(
    steps: tuple[float, float], save: Any, dataset: Dataset, tmp_path: Path
) -> None:
    metrics = [{"step": step, "val_loss": 2.0, "checkpoint": "best"} for step in steps]
    with pytest.raises(AttnlmError, match="step"):
        save(Written(dataset.vocab_size, 12), metrics=metrics)
    assert not any((tmp_path / "checkpoints").glob("*"))
