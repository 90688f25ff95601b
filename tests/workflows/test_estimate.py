"""`train --dry-run`: counted, estimated and measured, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.data.dataset import Dataset
from attnlm.workflows import estimate as estimating
from tests import own_code
from tests.kit import command, fails
from tests.models import places

SMALL: dict[str, Any] = {"block_size": 8, "batch_size": 4, "threads": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time ten steps, however short."""
    monkeypatch.setattr(estimating, "_SHORTEST", 0.0)


def test_steps_are_counted_estimated_and_measured(dataset: Dataset) -> None:
    notes: list[object] = []
    cost = attnlm.estimate(dataset, **SMALL, steps=50, on_event=notes.append)
    assert [getattr(note, "text", "") for note in notes] == ["measuring ten steps"]
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


def test_a_budget_limits_the_steps(dataset: Dataset) -> None:
    cost = attnlm.estimate(dataset, **SMALL, budget=20.0)
    assert cost.steps == 20 // cost.step_seconds


def test_the_rest_of_a_run_is_estimated(dataset: Dataset, tmp_path: Path) -> None:
    about: dict[str, Any] = {"checkpoint_dir": tmp_path}
    run = attnlm.train(dataset, **SMALL, steps=3, seed=1, name="mine", **about)
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    data_dir = dataset.path.parent
    rest = attnlm.estimate(resume="mine", steps=10, data_dir=data_dir, **about)
    assert rest.steps == 7 and rest.config.training.seed == 1
    with pytest.raises(UsageError, match="`batch_size` cannot be changed"):
        attnlm.estimate(resume=run, batch_size=2)
    with pytest.raises(UsageError, match="`vocab_size`"):
        attnlm.estimate(resume=run, vocab_size=2)
    tuned = attnlm.estimate(dataset, start_from=run, batch_size=2, steps=1)
    assert tuned.config.spec == run.config.spec
    (tmp_path / "other.txt").write_text("another text " * 99)
    other = attnlm.prepare(tmp_path / "other.txt", tokenizer="byte", data_dir=tmp_path / "data")
    with pytest.raises(AttnlmError, match="not encoded with the tokenizer of mine"):
        attnlm.estimate(other, start_from=run)
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_one_process_measures_its_part_of_the_batch(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(estimating, "cores", lambda: 6)
    large: dict[str, Any] = {"model": "transformer", "batch_size": 64, "device": "cpu", "steps": 1}
    cost = attnlm.estimate(dataset, processes=2, **large)
    assert (cost.config.training.processes, cost.config.training.threads) == (2, 3)
    alone = attnlm.estimate(dataset, threads=3, **large)
    assert alone.step_flops == cost.step_flops and cost.memory < alone.memory


@pytest.fixture
def folder(project: Path, tmp_path: Path) -> Path:
    """A folder with a data set, a run and a part of the user's own."""
    shutil.copytree(project / "data", tmp_path / "data")
    (tmp_path / "mine.py").write_text(own_code.PARTS)
    attnlm.train("fruits-char", **SMALL, steps=2, name="run", **places(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        "",
        "fruits-char --processes 2 --batch-size 8",
        "--vocab-size 300 --model gpt2 --dropout 0.1 --learning-rate 0.1",
        "--recipe best --budget 0.3s",
        "--budget 1m --model bigram --name new --log tensorboard --verify",
        "--resume run --steps 9",
        "--from run --checkpoint last --steps 9",
        "--attention mine.py:Head --set start=2 --force",
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
    arguments = ["train", "--dry-run", "--model", "transformer", "--processes", "4"]
    said = command(*arguments, "--steps", "7", cwd=folder).stdout
    facts = json.loads(command(*arguments, "--steps", "7", "--json", cwd=folder).stdout)
    assert f"model   transformer, {facts['parameters']:,} parameters: layers 2" in said
    assert "in 4 processes" in said and "in each process" in said
    assert "device  cpu (" in said and "GFLOP a step" in said
    assert " for 7 steps, without evaluations" in said


@pytest.mark.parametrize(
    ("arguments", "code", "says", "hints"),
    [
        ("--dry-run --vocab-size 0", 2, "invalid value for --vocab-size: 0", "between"),
        ("--dry-run --vocab-size 9 --model bigram --heads 2", 2, "does not apply", "--model"),
        ("--dry-run --vocab-size 9 --processes 3", 2, "not divisible by --processes 3", "--batch"),
        ("--dry-run --vocab-size 9 --device cuda", 1, "--device cuda cannot be used", "cpu"),
        ("--dry-run --vocab-size 9 --recipe best --budget 9s", 2, "for a text", "data set"),
        ("--dry-run --vocab-size 9 --loss-on answers", 2, "needs questions", "prepare a task"),
        ("--dry-run --vocab-size 9 --embed-dim 65536 --heads 4", 1, "of memory, but cpu", "lower"),
        ("fruits-char --dry-run --vocab-size 9", 2, "--vocab-size cannot be combined", "only one"),
        ("--vocab-size 9", 2, "--vocab-size needs --dry-run", "name a data set"),
        ("--dry-run nowhere", 1, "data set 'nowhere' not found", ""),
        ("--dry-run --share 0.4", 2, "no such option: --share", "train with --dry-run measures"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(
    arguments: str, code: int, says: str, hints: str, project: Path
) -> None:
    fails("train", *arguments.split(), cwd=project, code=code, says=says, hints=hints)


def test_a_model_that_sees_later_tokens_needs_force(folder: Path) -> None:
    (folder / "leak.py").write_text(
        "from torch import nn\nclass Leak(nn.Module):\n    def forward(self, x):\n"
        "        return x + x.flip(1)\n"
    )
    leaking = ("train", "--dry-run", "--attention", "leak.py:Leak")
    fails(*leaking, cwd=folder, code=1, says="is not causal", hints="--force")
    assert "parameters" in command(*leaking, "--force", cwd=folder).stdout
