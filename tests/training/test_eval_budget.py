"""Evaluations while training use the whole split if that is cheap, else a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.events import Note
from attnlm.compute.device import choose_device
from attnlm.config.recipes import load_recipe, recipe_names
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import MODELS
from attnlm.see.report import report
from attnlm.see.report_page import report_page
from attnlm.training import eval_budget
from attnlm.training.eval_budget import affordable_eval_tokens, affordable_sample_tokens
from attnlm.training.validation_loss import MOST_TOKENS, validation_loss
from tests.kit import command
from tests.models import parts_of

SMALL: dict[str, Any] = {"block_size": 8, "batch_size": 4, "seed": 1, "device": "cpu"}
# GPT-2's ids, and a recipe of several sizes.
UNLIKE = ("r4-gpt2-windows", "best")
SHAKESPEARE = {"vocab_size": 65, "val_tokens": 111_540}


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is cheap by itself, and few tokens are enough."""
    monkeypatch.setattr(eval_budget, "_CHEAP", 0.0)
    monkeypatch.setattr(eval_budget, "_FEWEST_TOKENS", 16)


@pytest.mark.parametrize(
    "config",
    [
        *(resolve({"model": model}) for model in MODELS),
        *(resolve({}, load_recipe(name)) for name in recipe_names() if name not in UNLIKE),
    ],
)
def test_a_megabyte_of_characters_is_evaluated_whole_and_sampled_in_full(config: Any) -> None:
    assert affordable_eval_tokens(config, **SHAKESPEARE) is None
    assert affordable_sample_tokens(config, 65) == 80


def test_expensive_evaluations_use_a_part_of_the_split() -> None:
    few = resolve({"steps": 30})
    tokens = affordable_eval_tokens(few, 50_257, 150_000)
    # Three steps of 32 × 64 tokens cost nine times that in forward passes; a tenth is too few.
    assert tokens == 2048 and 8 <= affordable_sample_tokens(few, 50_257) < 80
    more = resolve({"steps": 3000})
    assert affordable_eval_tokens(more, 50_257, 300_000) == 300 * 32 * 64 * 3 // 10 // 64 * 64
    assert affordable_eval_tokens(more, 50_257, 150_000) is None
    assert affordable_eval_tokens(few, 50_257, 1500) is None
    brief = resolve({"model": "transformer", "steps": 20})
    assert affordable_eval_tokens(brief, **SHAKESPEARE) == 2048
    large = resolve({"steps": 10**6})
    assert affordable_eval_tokens(large, 50_257, 10 * MOST_TOKENS) is None  # its cap


def test_a_part_is_spread_evenly_over_the_split(dataset: Dataset) -> None:
    torch.manual_seed(0)
    model = parts_of(resolve({"block_size": 8})).build(dataset.vocab_size)
    cpu = choose_device("cpu")
    val: Any = np.asarray(dataset.val)
    part = validation_loss(model, val, cpu, bytes_per_token=1.0, most=5 * 8 + 3)
    whole = (len(val) - 1) // 8
    losses = []
    for number in range(5):
        start = number * whole // 5 * 8
        window = torch.tensor(val[start : start + 9].astype(int))
        losses.append(model.loss(window[None, :-1], window[None, 1:]).item())
    assert part.tokens == 40
    assert part.loss == pytest.approx(sum(losses) / 5, rel=1e-5)
    everything = validation_loss(model, val, cpu, bytes_per_token=1.0)
    for most in (len(val) - 1, 10 * len(val)):
        assert validation_loss(model, val, cpu, bytes_per_token=1.0, most=most) == everything


def test_partial_losses_are_labelled_and_the_last_loss_is_complete(
    costly: None, dataset: Dataset, tmp_path: Path
) -> None:
    notes: list[object] = []
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path, "on_event": notes.append}
    run = attnlm.train(dataset.path, steps=80, eval_every=20, **SMALL, **folders)
    assert run.config.training.eval_tokens == 192
    assert {record["evaluated_tokens"] for record in run.metrics()} == {192}
    assert run.evaluated_part == f"192 of {dataset.val_tokens:,} tokens"
    whole = run.whole()
    for which in ("best", "last"):
        measured = attnlm.evaluate(run, checkpoint=which, data=dataset)
        assert (whole[which].val_loss, whole[which].evaluated_tokens) == (
            measured.loss,
            measured.tokens,
        )
    assert measured.tokens == dataset.val_tokens - 1
    assert any(isinstance(note, Note) and "whole validation split" in note.text for note in notes)
    page = report_page(report(run, data_dir=dataset.path.parent)).decode()
    assert run.evaluated_part in page and "best loss, whole split" in page

    # A longer training uses the same part, and repeats the last evaluation.
    longer = attnlm.train(resume=run.path, steps=120, **folders)
    assert longer.config.training.eval_tokens == 192
    assert longer.whole()["last"].step == 120
    with pytest.raises(UsageError, match="`eval_tokens` cannot be changed"):
        attnlm.train(resume=run.path, eval_tokens=64, steps=120, **folders)


def test_the_last_loss_is_partial_if_the_split_is_too_large(
    costly: None, dataset: Dataset, tmp_path: Path
) -> None:
    run = attnlm.train(dataset.path, steps=6, checkpoint_dir=tmp_path / "runs", **SMALL)
    part = f"16 of {dataset.val_tokens:,} tokens"
    assert run.evaluated_part == part and run.whole() == {}
    (entry,) = attnlm.list_runs(tmp_path / "runs")
    assert entry.evaluated_part == part and f"on {part} (" in str(run.checkpoint())
    about = ("--checkpoint-dir", tmp_path / "runs")
    shown = command("list", "runs", *about, cwd=tmp_path)
    assert f"~{entry.val_loss:.4f}" in shown.stdout and "~ measured on a part" in shown.stderr
