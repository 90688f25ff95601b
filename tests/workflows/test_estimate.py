"""`train --dry-run`: counted, estimated and measured, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.data.dataset import Dataset
from attnlm.workflows import estimate as estimating
from tests import own_code
from tests.kit import command
from tests.models import places

SMALL: dict[str, Any] = {"block_size": 8, "batch_size": 4, "threads": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one step, however short."""
    monkeypatch.setattr(estimating, "_MEASURED", 0.0)


def test_steps_are_counted_estimated_and_measured(dataset: Dataset) -> None:
    notes: list[object] = []
    cost = attnlm.estimate(dataset, **SMALL, steps=50, on_event=notes.append)
    assert [getattr(note, "text", "") for note in notes] == ["measuring the time of a step"]
    assert cost.vocab_size == dataset.vocab_size and cost.config.training.compile != "auto"
    costs = cost.config.spec.costs(cost.vocab_size)
    assert cost.step_flops == 4 * 8 * costs.training_flops
    assert (cost.steps, cost.flops) == (50, 50 * cost.step_flops)
    assert 0 < cost.step_seconds < 1
    assert cost.seconds == 50 * cost.step_seconds
    assert cost.tokens_per_second == 32 / cost.step_seconds
    made_up = attnlm.estimate(vocab_size=dataset.vocab_size, **SMALL)
    assert made_up.parameters == cost.parameters and made_up.memory == cost.memory
    assert attnlm.estimate(vocab_size=7, model="bigram", **SMALL).step_flops == 0
    within = attnlm.estimate(dataset, **SMALL, budget=20.0)
    assert within.steps == 20 // within.step_seconds


def test_the_rest_of_a_run_is_estimated(dataset: Dataset, tmp_path: Path) -> None:
    about: dict[str, Any] = {"checkpoint_dir": tmp_path}
    run = attnlm.train(dataset, **SMALL, steps=3, seed=1, name="mine", **about)
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    data_dir = dataset.path.parent
    rest = attnlm.estimate(resume="mine", steps=10, data_dir=data_dir, **about)
    assert rest.steps == 7 and rest.config.training.seed == 1
    tuned = attnlm.estimate(dataset, start_from=run, batch_size=2, steps=1)
    assert tuned.config.spec == run.config.spec
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_one_process_measures_its_part_of_the_batch(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(estimating, "cores", lambda: 6)
    large: dict[str, Any] = {**SMALL, "model": "transformer", "batch_size": 64, "steps": 1}
    del large["threads"]
    cost = attnlm.estimate(dataset, processes=2, **large)
    assert (cost.config.training.processes, cost.config.training.threads) == (2, 3)
    alone = attnlm.estimate(dataset, threads=3, **large)
    assert alone.step_flops == cost.step_flops and cost.memory < alone.memory


@pytest.fixture
def folder(project: Path, tmp_path: Path) -> Path:
    """A folder with a data set, a run, a part of the user's own and one that looks ahead."""
    shutil.copytree(project / "data", tmp_path / "data")
    (tmp_path / "mine.py").write_text(own_code.PARTS)
    (tmp_path / "leak.py").write_text(own_code.LEAK)
    attnlm.train("fruits-char", **SMALL, steps=2, name="run", **places(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        "",
        "fruits-char --processes 2 --batch-size 8",
        "--vocab-size 300 --model gpt2 --embed-dim 16 --dropout 0.1 --learning-rate 0.1",
        "--recipe best --budget 0.3s",
        "--budget 1m --model bigram --name new --log tensorboard --verify",
        "--resume run --steps 9",
        "--from run --checkpoint last --steps 9",
        "--attention mine.py:Head --set start=2",
        "--attention leak.py:Leak --force",
        "--recipe checkpoints/run/config.json --micro-batch-size 2 --seed 3 --exist-ok",
    ],
)
def test_no_option_of_train_makes_a_dry_run_write(
    options: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr("attnlm.compute.launcher.run_processes", None)
    done = command("train", "--dry-run", *options.split(), "--json", cwd=folder)
    facts = json.loads(done.stdout)
    assert sorted(folder.rglob("*")) == before
    assert facts["seconds"] == facts["steps"] * facts["step_seconds"] and facts["memory"] > 0


def test_the_output_of_a_dry_run(folder: Path) -> None:
    words = ["train", "--dry-run", "--model", "transformer", "--processes", "4", "--steps", "7"]
    words += ["--embed-dim", "16"]
    said = command(*words, cwd=folder).stdout
    facts = json.loads(command(*words, "--json", cwd=folder).stdout)
    assert f"model   transformer, {facts['parameters']:,} parameters: layers 2" in said
    assert "split   4 processes" in said and "in each process" in said
    assert "device  cpu (" in said and "FLOP a step" in said
    assert " for 7 steps, without evaluations" in said
