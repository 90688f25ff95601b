"""A list of trainings: finished runs are taken, unfinished ones resumed, and others refused."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import ignore
from attnlm.base.process import Interrupted
from attnlm.data.dataset import Dataset
from attnlm.training.events import Evaluated, Started
from attnlm.workflows.train_all import train_all
from tests.models import assert_same_run, prepared

SMALL: dict[str, Any] = {"model": "bigram", "steps": 4, "eval_every": 2, "block_size": 8}


def trainings(**settings: Any) -> dict[str, dict[str, Any]]:
    return {f"seed-{seed}": {**SMALL, "seed": seed, **settings} for seed in (1, 2)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("data"))


def test_finished_runs_are_taken_and_others_resumed(dataset: Dataset, tmp_path: Path) -> None:
    events: list[object] = []
    train = functools.partial(train_all, trainings(), dataset, title="a rung")
    whole = train(tmp_path / "whole", on_event=events.append)
    assert [*whole] == ["seed-1", "seed-2"] and sum(isinstance(e, Started) for e in events) == 2
    assert {"a rung, seed 1", "a rung, seed 2"} < {str(event) for event in events}

    def stop(event: object) -> None:
        if isinstance(event, Evaluated) and event.step == 2 and len(started) == 2:
            signal.raise_signal(signal.SIGINT)
        started.extend([event] if isinstance(event, Started) else [])

    started: list[Started] = []
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", on_event=stop)
    events.clear()
    resumed = train(tmp_path / "stopped", on_event=events.append)
    (again,) = (event for event in events if isinstance(event, Started))
    assert (again.run.name, again.first_step) == ("seed-2", 2)
    for name, run in resumed.items():
        assert_same_run(run, whole[name])
    events.clear()
    assert train(tmp_path / "stopped", on_event=events.append).keys() == whole.keys()
    assert not any(isinstance(event, Started) for event in events)


def test_a_run_finds_its_data_from_another_folder(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset.path.parent)
    relative = attnlm.open_dataset(dataset.path.name, data_dir=".")
    (run, _) = train_all(trainings(), relative, tmp_path, ignore).values()
    monkeypatch.chdir(tmp_path)
    assert attnlm.open_run(run.path).open_dataset().path == dataset.path


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"learning_rate": 0.3}, "learning_rate"), ({"steps": 6}, "steps"), ({"seed": 3}, "seed")],
)
def test_a_run_of_other_settings_or_data_is_refused(
    changed: dict[str, Any], named: str, dataset: Dataset, tmp_path: Path
) -> None:
    train_all(trainings(), dataset, tmp_path, ignore)
    with pytest.raises(AttnlmError, match=f"called seed-1 exists, but its `{named}` differs"):
        train_all(trainings(**changed), dataset, tmp_path, ignore)
    other = prepared(tmp_path, "another text of fruits " * 50, name="other")
    with pytest.raises(AttnlmError, match="but its `data set` differs"):
        train_all(trainings(), other, tmp_path, ignore)
