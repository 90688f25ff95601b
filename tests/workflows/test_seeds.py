"""One model with several seeds: its runs, and the interval of their mean loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.data.dataset import Dataset
from attnlm.see.verdicts import interval
from tests import own_code
from tests.command import attnlm as command
from tests.command import fails
from tests.fake_clock import Clock

SMALL: dict[str, Any] = {"embed_dim": 8, "heads": 2, "block_size": 8, "batch_size": 4, "steps": 4}


def test_seeds_are_runs_that_differ_in_the_seed_only(dataset: Dataset, tmp_path: Path) -> None:
    given = {**SMALL, "model": "multi-head", "seed": 5, "checkpoint_dir": tmp_path, "name": "m"}
    found = attnlm.train_seeds(dataset, seeds=3, **given)
    assert [run.name for run in found.runs] == ["m", "m-seed-6", "m-seed-7"]
    settings = [run.config.settings() for run in found.runs]
    assert [one.pop("seed") for one in settings] == [5, 6, 7]
    assert settings[0] == settings[1] == settings[2]
    alone = attnlm.train(dataset, **{**given, "seed": 6, "name": "alone"})
    result = alone.result()
    assert result is not None and found.losses[1] == result.final.val_loss
    assert found.interval == interval(found.losses)
    again = attnlm.train_seeds(dataset, seeds=3, exist_ok=True, **given)
    assert again.losses == found.losses


def test_a_budget_becomes_the_steps_of_all_seeds(
    dataset: Dataset, tmp_path: Path, ticking_clock: Clock
) -> None:
    given = {key: value for key, value in SMALL.items() if key != "steps"}
    found = attnlm.train_seeds(dataset, seeds=2, budget=0.5, checkpoint_dir=tmp_path, **given)
    first, second = (run.evaluations()[-1].step for run in found.runs)
    assert first == second > 1


def test_the_command_prints_median_range_and_interval(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(own_code.PARTS)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    flags += ["--attention=mine.py:Head", "--set=start=2", "--name=mine", "--seed=1"]
    words = ["train", str(dataset.path), "--seeds=3", *flags]
    done = command(*words, cwd=tmp_path)
    names = ["mine", "mine-seed-2", "mine-seed-3"]
    assert [Path(line).name for line in done.stdout.splitlines()] == names
    for label in ("median  ", "range  ", "95% interval", "of 3 seeds"):
        assert label in done.stderr
    facts = json.loads(command(*words, "--exist-ok", "--json", cwd=tmp_path).stdout)
    assert [Path(path).name for path in facts["runs"]] == names
    assert sorted(facts["val_losses"])[1] == facts["median"]
    low, high = facts["interval"]
    assert low < facts["median"] < high
    for other in (("--resume", "mine"), ("--processes", "2")):
        refused = ("train", str(dataset.path), *other, "--seeds", "2")
        fails(*refused, cwd=tmp_path, code=2, says="--seeds", hints="only one")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seeds": 1}, "`seeds`: 1"),
        ({"resume": "x"}, "`resume`"),
        ({"processes": 2}, "`processes`"),
    ],
)
def test_impossible_seeds_are_refused(
    given: dict[str, Any], says: str, dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        attnlm.train_seeds(dataset, checkpoint_dir=tmp_path / "runs", **given)
    assert not (tmp_path / "runs").exists()


def test_other_runs_are_not_taken_for_seeds(dataset: Dataset, tmp_path: Path) -> None:
    given = {**SMALL, "checkpoint_dir": tmp_path, "seed": 1}
    attnlm.train(dataset, name="m-seed-2", **given)
    with pytest.raises(AttnlmError, match="m-seed-2"):
        attnlm.train_seeds(dataset, seeds=2, name="m", **given)
