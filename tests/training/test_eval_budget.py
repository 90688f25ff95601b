"""Evaluations while training use the whole split if that is cheap, else a part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnlm
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
from tests.models import small_model

# GPT-2's ids, and a recipe of several sizes.
UNLIKE = ("r4-gpt2-windows", "best")
SHAKESPEARE = {"vocab_size": 65, "val_tokens": 111_540}


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is cheap by itself, and few tokens are enough."""
    monkeypatch.setattr(eval_budget, "_CHEAP", 0.0)
    monkeypatch.setattr(eval_budget, "_FEWEST_TOKENS", 16)


@pytest.mark.usefixtures("whole_snapshots")
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


@pytest.mark.usefixtures("whole_snapshots")
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
    model = small_model("multi-head", dataset.vocab_size, block_size=8).float()
    val, cpu = np.asarray(dataset.val), choose_device("cpu")
    part = validation_loss(model, val, cpu, bytes_per_token=1.0, most=5 * 8 + 3)
    whole = (len(val) - 1) // 8
    starts = [number * whole // 5 * 8 for number in range(5)]
    windows = [val[start : start + 9] for start in starts]
    losses = [validation_loss(model, window, cpu, bytes_per_token=1.0).loss for window in windows]
    assert part.tokens == 40
    assert part.loss == pytest.approx(sum(losses) / 5, rel=1e-5)
    everything = validation_loss(model, val, cpu, bytes_per_token=1.0)
    for most in (len(val) - 1, 10 * len(val)):
        assert validation_loss(model, val, cpu, bytes_per_token=1.0, most=most) == everything


@pytest.mark.usefixtures("costly")
def test_partial_losses_are_labelled_and_the_last_loss_is_complete(
    train: Any, dataset: Dataset
) -> None:
    notes: list[object] = []
    run = train(steps=80, eval_every=20, on_event=notes.append)
    assert run.config.training.eval_tokens == 288
    assert {record["evaluated_tokens"] for record in run.metrics()} == {288}
    assert run.evaluated_part == f"288 of {dataset.val_tokens:,} tokens"
    for which, whole in run.whole().items():
        measured = attnlm.evaluate(run, checkpoint=which, data=dataset)
        assert (whole.val_loss, whole.evaluated_tokens) == (measured.loss, measured.tokens)
        assert measured.tokens == dataset.val_tokens - 1
    assert any(isinstance(note, Note) and "whole validation split" in note.text for note in notes)
    page = report_page(report(run, data_dir=dataset.path.parent)).decode()
    assert run.evaluated_part in page and "best loss, whole split" in page

    # A longer training uses the same part, and repeats the last evaluation.
    longer = attnlm.train(resume=run.path, steps=120)
    assert longer.config.training.eval_tokens == 288
    assert longer.whole().keys() == {"best", "last"} and longer.whole()["last"].step == 120


@pytest.mark.usefixtures("costly")
def test_the_last_loss_is_partial_if_the_split_is_too_large(train: Any, dataset: Dataset) -> None:
    run = train(steps=6, eval_every=1, block_size=8)
    part = f"16 of {dataset.val_tokens:,} tokens"
    assert run.evaluated_part == part and run.whole() == {}
    runs = run.path.parent
    (entry,) = attnlm.list_runs(runs)
    assert entry.evaluated_part == part and f"on {part} (" in str(run.checkpoint())
    shown = command("list", "runs", "--checkpoint-dir", runs, cwd=runs)
    assert f"~{entry.val_loss:.4f}" in shown.stdout and "~ measured on a part" in shown.stderr
