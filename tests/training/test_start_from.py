"""A run that starts from another's weights: what it takes, what it records, what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.runs.checkpoint import load_checkpoint
from attnlm.runs.load_model import parent_weights
from attnlm.runs.run import Run
from tests.kit import ATTNLM, command, fails
from tests.models import parts_of, places, prepared
from tests.processes import finish, started
from tests.tolerances import assert_near

SMALL: dict[str, Any] = {"batch_size": 4, "steps": 6, "eval_every": 3, "seed": 1}
SMALL |= {"device": "cpu", "threads": 1, "schedule": "constant"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the data set fruits-char and the run `parent`."""
    path = tmp_path_factory.mktemp("project")
    prepared(path)
    sizes = {"block_size": 8, "heads": 2, "embed_dim": 16}
    attnlm.train(**places(path), name="parent", **{**SMALL, **sizes, "steps": 30})
    return path


def child(folder: Path, **settings: Any) -> Run:
    return attnlm.train(
        "fruits-char", **{**places(folder), "start_from": "parent", **SMALL, **settings}
    )


def weights(run: Run, which: str = "last") -> dict[str, Any]:
    path = run.path / f"{which}.safetensors"
    return load_checkpoint(path, run.config.spec, run.vocab_size)[1]


def test_a_child_starts_with_the_weights_of_its_parent(folder: Path) -> None:
    parent = attnlm.open_run("parent", checkpoint_dir=folder / "checkpoints")
    run = child(folder, seed=7, learning_rate=1e-4)
    assert run.metrics()[0]["val_loss"] == min(r["val_loss"] for r in parent.metrics())
    assert run.config.spec == parent.config.spec
    assert (run.config.training.seed, run.config.training.learning_rate) == (7, 1e-4)
    start = parent.checkpoint("auto")
    assert run.parent is not None
    assert vars(run.parent) == {
        "name": "parent",
        "path": str(parent.path.absolute()),
        "checkpoint": start.which,
        "step": start.step,
        "sha256": files.file_hash(start.path),
    }
    assert attnlm.open_run(run.path).parent == run.parent
    shown = command("report", "--json", run.path, "--data-dir", folder / "data", cwd=folder)
    assert json.loads(shown.stdout)["parent"] == vars(run.parent)
    assert "parent, step 30" in (run.path / "report.html").read_text()

    assert parent_weights(run, run.parent).keys() == weights(run).keys()
    with pytest.raises(AttnlmError, match="has changed since"):
        parent_weights(run, replace(run.parent, sha256="0" * 64))


def test_a_child_may_start_from_either_checkpoint(folder: Path, tmp_path: Path) -> None:
    parent = child(folder, learning_rate=1.0)  # which makes it worse: its best is its first
    assert parent.best != parent.last and parent.checkpoint("best").step == 0
    for which in ("best", "last"):
        run = child(folder, start_from=parent, checkpoint=which, steps=1, learning_rate=1e-12)
        expected = weights(parent, which)
        for name, values in weights(run).items():
            assert_near(values, expected[name])
        assert run.parent is not None and run.parent.checkpoint == which


def test_settings_that_change_the_model_are_refused_by_name(folder: Path) -> None:
    recipe = folder / "recipe.toml"
    changes = {"heads": 4, "block_size": 16, "model": "wide-head", "projection": True, "layers": 2}
    for name, value in changes.items():
        with pytest.raises(UsageError, match=f"`{name}` cannot be changed"):
            child(folder, **{name: value})
        recipe.write_text(f"{name} = {json.dumps(value)}\n")
        with pytest.raises(AttnlmError, match=f"in the recipe: `{name}` cannot"):
            child(folder, recipe=recipe)
    # What changes nothing, and dropout, are not.
    run = child(folder, heads=2, block_size=8, dropout=0.1)
    assert parts_of(run.config).dropout == 0.1
    recipe = folder / "checkpoints" / "parent" / "config.json"
    assert parts_of(child(folder, recipe=recipe).config).dropout == 0.0


def test_data_of_another_tokenizer_are_refused_until_they_have_this_one(folder: Path) -> None:
    prepared(folder, "30 pears are 3 fruits.\n" * 40, "pears")
    arguments = "train", "pears-char", "--from", "parent", "--steps", "4", "--batch-size", "2"
    path = Path("checkpoints") / "parent"
    fails(*arguments, cwd=folder, code=1, says="tokenizer of parent", hints=f"--tokenizer {path}")
    command("prepare", "pears.txt", "--tokenizer", path, cwd=folder)
    command("prepare", "pears.txt", "--tokenizer", path, cwd=folder)  # is there already
    done = command("train", "pears-parent", *arguments[2:], cwd=folder)
    assert "the weights of parent, step 30" in done.stderr
    (folder / "plums.txt").write_text("PLUMS!\n" * 40)
    again = "prepare", "plums.txt", "--tokenizer", path
    fails(*again, cwd=folder, code=1, says="the vocabulary of parent lacks", hints="byte")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo and signals of Unix")
def test_several_processes_start_from_it_and_one_logs(folder: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    alone = child(folder)
    settings = [("--" + name.replace("_", "-"), str(value)) for name, value in SMALL.items()]
    arguments = "train", "fruits-char", "--from", "parent", "--processes", "2"
    more = (*sum(settings, ()), "--log", "tensorboard", "--name", "two")
    with started(*ATTNLM, *arguments, *more, cwd=folder) as process:
        finish(process, 0)
    two = attnlm.open_run(folder / "checkpoints" / "two")
    for one, other in zip(alone.metrics(), two.metrics(), strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    assert two.parent == alone.parent
    assert len(list((two.path / "tensorboard").iterdir())) == 1


def test_from_cannot_be_combined_with_other_runs(folder: Path) -> None:
    arguments = "train", "--from", "parent", "--resume", "parent"
    fails(*arguments, cwd=folder, code=2, says="--resume cannot be combined with", hints="recorded")
    for flag in ("--exist-ok", "--force"):
        says = f"--resume cannot be combined with {flag}"
        fails(
            "train", "--resume", "parent", flag, cwd=folder, code=2, says=says, hints="leave it out"
        )
    fails(*("train", "--from", "nobody"), cwd=folder, code=1, says="'nobody'", hints="there ")
