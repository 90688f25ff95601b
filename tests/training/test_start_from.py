"""A run that starts from another's weights: what it takes, and what it records."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.runs.checkpoint import load_checkpoint
from attnlm.runs.load_model import parent_weights
from attnlm.runs.run import Run
from tests.kit import ATTNLM, QUICK, command, quick_run
from tests.models import parts_of, prepared
from tests.processes import finish, started
from tests.tolerances import assert_near


@pytest.fixture(scope="module")
def parent(dataset: attnlm.Dataset) -> Run:
    return quick_run(dataset, "multi-head:heads=2:embed_dim=16", steps=30, name="parent")


@pytest.fixture
def child(parent: Run, dataset: attnlm.Dataset, tmp_path: Path) -> Any:
    """Return a function that trains from the parent's weights."""
    more: dict[str, Any] = {name: QUICK[name] for name in QUICK if name != "block_size"}
    more |= {"start_from": parent, "checkpoint_dir": tmp_path, "device": "cpu"}
    return functools.partial(attnlm.train, dataset, **more)


def weights(run: Run, which: str = "last") -> dict[str, Any]:
    path = run.path / f"{which}.safetensors"
    return load_checkpoint(path, run.config.spec, run.vocab_size)[1]


def test_a_child_starts_with_the_best_weights_of_its_parent_and_settings_of_its_own(
    parent: Run, child: Any
) -> None:
    run = child(seed=7, learning_rate=1e-4)
    assert run.metrics()[0]["val_loss"] == min(r["val_loss"] for r in parent.metrics())
    assert run.config.spec == parent.config.spec
    assert (run.config.training.seed, run.config.training.learning_rate) == (7, 1e-4)


def test_a_child_names_the_checkpoint_of_its_parent(parent: Run, child: Any, project: Path) -> None:
    run, start = child(steps=1), parent.checkpoint("auto")
    assert vars(run.parent) == {
        "name": "parent",
        "path": str(parent.path.absolute()),
        "checkpoint": start.which,
        "step": start.step,
        "sha256": parent.facts(start.path).sha256,
    }
    assert attnlm.open_run(run.path).parent == run.parent
    shown = command("report", "--json", run.path, cwd=project)
    assert json.loads(shown.stdout)["parent"] == vars(run.parent)
    assert f"parent, best checkpoint (step {start.step})" in (run.path / "report.html").read_text()
    began = parent_weights(run, run.parent)
    assert all(np.array_equal(began[name], w) for name, w in weights(parent, start.which).items())
    with pytest.raises(AttnlmError, match="has changed since"):
        parent_weights(run, replace(run.parent, sha256="0" * 64))


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_child_may_start_from_either_checkpoint(which: str, child: Any) -> None:
    worse = child(learning_rate=1.0)
    assert worse.checkpoint("best").step == 0 < worse.checkpoint("last").step
    run = child(start_from=worse, checkpoint=which, steps=1, learning_rate=1e-12)
    for name, values in weights(run).items():
        assert_near(values, weights(worse, which)[name])
    assert run.parent.checkpoint == which


def test_settings_that_change_nothing_and_dropout_are_accepted(parent: Run, child: Any) -> None:
    assert parts_of(child(heads=2, block_size=12, dropout=0.1).config).dropout == 0.1
    assert parts_of(child(recipe=parent.path / "config.json").config).dropout == 0.0


def test_data_get_the_tokenizer_of_the_parent(parent: Run, project: Path) -> None:
    prepared(project, "30 pears are 3 fruits.\n" * 40, "pears")
    for _ in range(2):  # the second time they are there already
        command("prepare", "pears.txt", "--tokenizer", "checkpoints/parent", cwd=project)
    done = command("train", "pears-parent", "--from", "parent", "--steps", "1", cwd=project)
    assert "started from  parent, best checkpoint (step 30)" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals of Unix")
def test_several_processes_start_from_it_and_one_logs(child: Any, project: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    alone = child()
    arguments = ("train", "fruits-char", "--from", "parent", "--processes=2", "--name=two")
    sizes = ("--steps=4", "--batch-size=4", "--seed=1", "--log=tensorboard")
    with started(*ATTNLM, *arguments, *sizes, cwd=project) as process:
        finish(process, 0)
    two = attnlm.open_run(project / "checkpoints" / "two")
    for one, other in zip(alone.metrics(), two.metrics(), strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    assert two.parent == alone.parent
    assert len(list((two.path / "tensorboard").iterdir())) == 1
