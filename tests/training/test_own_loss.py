"""Own code whose batch may not be divided, or that draws: the machine chooses no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note
from attnlm.base.own_code import OwnCodeError
from attnlm.compute.device import choose_device
from attnlm.config.settings import Config, resolve_new
from attnlm.data.dataset import Dataset
from attnlm.training import own_code_trial, step
from attnlm.training.own_code_trial import Trial
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper, try_divisions
from attnlm.workflows import autotune as autotuning
from attnlm.workflows.autotune import autotune
from tests import own_code
from tests.models import contents

HEAD = """import itertools
import random

import numpy as np
import torch
from torch.nn import functional as F

counts = itertools.count()
own = np.random.default_rng(1)

def ce(l, t):
    return F.cross_entropy(l.mT, t, reduction="none")

def loss(l, ids, t):
    """
WHY = "the loss mine.py:loss gets the whole batch"
LOSSES = {
    "focal": "return ((1 - (-ce(l, t)).exp()) ** 2 * ce(l, t)).mean()",
    "gradient": (
        "return ce(l, t).mean() + torch.autograd.grad(l.square().sum(), l)[0].square().mean()"
    ),
    "weights": "return F.cross_entropy(l.mT, t, weight=torch.arange(1.0, l.size(-1) + 1))",
    "answers": "return F.cross_entropy(l.mT, t, ignore_index=-100)",
    "sum": "return F.cross_entropy(l.mT, t, reduction='sum')",
    "spread": "return ce(l, t).mean() + 0.01 * l.std(0).mean()",
    "dropout": "return F.cross_entropy(F.dropout(l, 0.3).mT, t)",
    "torch": "return ce(l, t).mean() * (1 + torch.rand(()))",
    "random": "return ce(l, t).mean() * (1 + random.random())",
    "numpy": "return ce(l, t).mean() * (1 + float(np.random.rand()))",
    "its own": "return ce(l, t).mean() * (1 + own.random())",
    "count": "return ce(l, t).mean() / (1 + next(counts))",
}
SEEDED = ("dropout", "torch", "random", "numpy")
REFUSED = ("its own", "count")
DIVISIONS: tuple[dict[str, Any], ...] = ({"threads": 2}, {"micro_batch_size": 1})


def _code(name: str, folder: Path) -> str:
    file = folder / "mine.py"
    file.write_text(f"{HEAD}{LOSSES[name]}\n")
    return f"{file}:loss"


def _config(name: str, folder: Path, **settings: Any) -> Config:
    given = {**own_code.SMALL, "model": "average", "loss": _code(name, folder), **settings}
    config = resolve_new(given, None).config
    return config.with_training(compile="modules")


def _tried(config: Config, dataset: Dataset) -> Trial:
    device = choose_device("cpu")
    model = initial_state(config, dataset.vocab_size, device).model
    return try_divisions(config, model, device, dataset)


def test_a_loss_is_not_tried(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(step, "try_own_code")
    assert _tried(_config("torch", tmp_path), dataset) == Trial(may_replicate=False, why_whole=WHY)


def _trained(name: str, dataset: Dataset, folder: Path, **settings: Any) -> tuple[Any, list[str]]:
    notes: list[str] = []
    run = attnlm.train(
        dataset,
        checkpoint_dir=folder / "checkpoints",
        on_event=lambda event: notes.append(str(event)) if isinstance(event, Note) else None,
        **{**own_code.SMALL, "model": "average", "loss": _code(name, folder), **settings},
    )
    return [record["val_loss"] for record in run.metrics()], notes


def _said(notes: list[str]) -> int:
    return sum(WHY in note for note in notes)


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in (*SEEDED, *REFUSED)])
def test_a_loss_is_computed_on_whole_batches(name: str, dataset: Dataset, tmp_path: Path) -> None:
    losses, notes = _trained(name, dataset, tmp_path)
    assert not _said(notes)  # nothing would have been divided
    for division in DIVISIONS:
        again, notes = _trained(name, dataset, tmp_path, **division)
        assert again == losses and _said(notes) == 1


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Questions and answers of other lengths in each window."""
    folder = tmp_path_factory.mktemp("asked")
    lines = [{"a": "a" * (1 + i % 7), "b": "b" * (1 + 5 * i % 9)} for i in range(99)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return attnlm.prepare(
        folder / "asked.jsonl", prompt_column="a", answer_column="b", data_dir=folder / "data"
    )


@pytest.mark.parametrize("name", ["answers", "sum"])
def test_a_loss_of_some_targets_is_computed_on_whole_batches(
    name: str, asked: Dataset, tmp_path: Path
) -> None:
    losses, _ = _trained(name, asked, tmp_path)
    for division in DIVISIONS:
        again, notes = _trained(name, asked, tmp_path, **division)
        assert again == losses and _said(notes) == 1


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("division", [{}, *DIVISIONS])
def test_a_loss_that_keeps_a_state_of_its_own_is_refused(
    name: str, division: dict[str, Any], dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(OwnCodeError, match="something else when another process opens") as caught:
        _trained(name, dataset, tmp_path, **division)
    assert "no attributes, variables of the file" in caught.value.hint


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_one_result_with_any_number_of_threads(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    before = own_code_trial._generators()
    losses, notes = _trained(name, dataset, tmp_path)
    assert not _said(notes) and own_code_trial._generators() == before
    assert all(_trained(name, dataset, tmp_path, threads=2)[0] == losses for _ in range(3))
    assert _trained(name, dataset, tmp_path, seed=2)[0] != losses


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_may_not_divide_the_batch_of_a_loss(
    count: int, dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"`processes` {count} divide it"):
        autotune(_config("sum", tmp_path, processes=count), choose_device("cpu"), dataset)


@pytest.mark.parametrize(("name", "chosen"), [("mean", None), ("nothing", 2)])
def test_no_micro_batch_is_chosen_for_whole_batches(
    name: str, chosen: int | None, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuning, "affordable_micro_batch", lambda *_: 2)

    def found(config: Config) -> int | None:
        return autotune(config, choose_device("cpu"), dataset).training.micro_batch_size

    assert found(_mixing(name, tmp_path)) == chosen
    assert found(_config("sum", tmp_path)) is None
    assert found(_config("sum", tmp_path, micro_batch_size=1)) == 1  # a note says that it is whole


def test_a_run_whose_processes_are_refused_stays_as_it_is(dataset: Dataset, tmp_path: Path) -> None:
    _trained("sum", dataset, tmp_path)
    path = next((tmp_path / "checkpoints").glob("*/config.json")).parent
    before = contents(path)
    with pytest.raises(UsageError, match=WHY) as caught:
        attnlm.train(resume=path, steps=8, processes=2, data_dir=dataset.path.parent)
    assert caught.value.hint == "use `processes` 1" and contents(path) == before


def test_whole_batches_that_do_not_fit_are_an_error_that_names_the_batch(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = choose_device("cpu")
    config = _config("sum", tmp_path, micro_batch_size=1, batch_size=40960)
    stepper = Stepper(initial_state(config, dataset.vocab_size, device), config, dataset)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "backward", fail)
    with pytest.raises(AttnlmError, match=WHY) as caught:
        stepper.step()
    assert caught.value.hint == "lower `batch_size` 40960"
    monkeypatch.setattr("attnlm.training.memory.machine_memory", lambda: 60 * 10**6)
    with pytest.raises(AttnlmError, match="this run needs about") as caught:
        autotune(config, device, dataset)
    assert "`batch_size`" in caught.value.hint


PART = """import random
import numpy as np
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.own = np.random.default_rng(0)
        self.numbers = nn.Parameter(torch.tensor(np.random.rand(embed_dim), dtype=torch.float32))
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, x):
        BODY
        return x * self.numbers
"""
BODIES = {
    "nothing": ("pass", True),
    "random": ("x = x * (1 + random.random())", False),
    "numpy": ("x = x * (1 + np.random.rand())", False),
    "its own": ("x = x * (1 + self.own.random())", False),
    "layer drop": ("x = x * 0 if random.random() < 0.001 else x", False),
    "a buffer in place": ("self.kept += 1", False),
    "another buffer": ("self.kept = self.kept + 1", False),
    "a mask that is made once": (
        "hasattr(self, 'new') or self.register_buffer('new', x[0, 0] * 0)",
        True,
    ),
    "a hook on a sum": (
        "self.numbers.requires_grad and self.numbers.register_post_accumulate_grad_hook(print)",
        False,
    ),
    "a hook": ("self.numbers.requires_grad and self.numbers.register_hook(torch.relu)", False),
    "no copy": ("self.lines = (line for line in [])", True),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_trial_of_a_model_finds_what_threads_may_not_share_and_changes_nothing(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    body, may_replicate = BODIES[name]
    (tmp_path / "part.py").write_text(PART.replace("BODY", body))
    settings = {**own_code.SMALL, "model": "transformer", "mlp": f"{tmp_path}/part.py:Part"}
    config = resolve_new({**settings, "embed_dim": 8, "heads": 2, "layers": 1}, None).config
    config = config.with_training(compile="modules")
    device = choose_device("cpu")
    np.random.rand()
    models = [initial_state(config, dataset.vocab_size, device).model for _ in range(2)]
    before = own_code_trial._generators()
    assert try_divisions(config, models[0], device, dataset).may_replicate == may_replicate
    assert own_code_trial._generators() == before
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][key]) for key, value in states[0].items())


MIXES = {
    "nothing": ("pass", True),
    "mean": ("x = x - x.mean(0, keepdim=True)", False),
    "mean in training": ("x = x - self.training * x.mean(0, keepdim=True)", False),
    "mean and dropout": ("x = torch.dropout(x - x.mean(0), 0.1, self.training)", False),
    "softmax over the batch": ("x = x.softmax(0)", False),
    "the text after the next": ("x = x + 0.01 * x.roll(2, 0)", False),
    "parameters": ("self.numbers.data.mul_(0.99 if self.training else 1)", True),
    "a limit": ("self.numbers.data.clamp_(0.4, 0.6)", True),
    "the other text": ("x = x + 0.01 * x.flip(0)", False),
    "dropout": ("x = torch.dropout(x, 0.1, self.training)", True),
    "noise": ("x = x + torch.randn_like(x)", True),
    "a count of evaluations": ("self.kept += not self.training", True),
    "a count": ("self.kept += 1; x = x / self.kept.sum()", True),
    "running mean": ("self.kept = self.kept + x.mean(); x = x - self.kept[0]", False),
    "not finite": ("x = x / 0", True),
}


def _mixing(name: str, folder: Path, **settings: Any) -> Config:
    (folder / "part.py").write_text(PART.replace("BODY", MIXES[name][0]))
    given = {**own_code.SMALL, "model": "transformer", "mlp": f"{folder}/part.py:Part"}
    given |= {"embed_dim": 8, "heads": 2, "layers": 1, "dropout": 0.0, **settings}
    config = resolve_new(given, None).config
    return config.with_training(compile="modules")


@pytest.mark.parametrize("name", MIXES)
def test_a_trial_of_a_model_finds_texts_that_change_each_other(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    why = _tried(_mixing(name, tmp_path), dataset).why_whole
    body, is_separate = MIXES[name]
    is_changing = is_separate and ("self.kept" in body or "mul_" in body)
    assert ("change each other" in why, "changes its buffers" in why) == (
        not is_separate,
        is_changing,
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [("mean", "change each other"), ("a count", "changes its buffers or parameters itself")],
)
def test_a_model_that_needs_whole_batches_has_one_result_for_each_seed(
    name: str, why: str, dataset: Dataset, tmp_path: Path
) -> None:
    results, notes = [], []
    for division in ({}, {"threads": 2}, {"micro_batch_size": 1}):
        run = attnlm.train(
            dataset,
            model="single-head",
            attention=_mixing(name, tmp_path).codes[0],
            **{**own_code.SMALL, "seed": 1, "threads": 1, **division},
            checkpoint_dir=tmp_path / "checkpoints",
            on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
        )
        results.append([e.val_loss for e in run.evaluations()])
    # Two threads of PyTorch's round otherwise than one. Half batches would differ by 0.5.
    assert results[0] == results[2] and results[1] == pytest.approx(results[0], abs=0.01)
    said = [note for note in notes if why in note]
    assert len(said) == 2 and "each batch is computed whole, not divided among threads" in said[0]
    with pytest.raises(UsageError, match=f"{why}.*, and `processes` 2 divide it"):
        autotune(_mixing(name, tmp_path, processes=2), choose_device("cpu"), dataset)
