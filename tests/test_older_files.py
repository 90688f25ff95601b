"""What attnlm 0.1 wrote still loads, evaluates, samples and resumes to the same numbers.

tests/older holds small runs of that version, and what it made of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.see.attend import attend
from attnlm.see.script import as_script

OLDER = Path(__file__).parent / "older"
EXPECTED: dict[str, dict[str, Any]] = json.loads((OLDER / "expected.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLDER, tmp_path / "older"))


@pytest.mark.parametrize("name", EXPECTED)
def test_an_older_run_evaluates_samples_and_resumes(name: str, folder: Path) -> None:
    places: Any = {"checkpoint_dir": folder / "runs"}
    expected = EXPECTED[name]
    data_dir = folder / "datasets"
    assert attnlm.evaluate(name, data_dir=data_dir, **places).loss == pytest.approx(
        expected["loss"], rel=1e-5
    )
    pieces = attnlm.sample(name, tokens=40, seed=3, temperature=0.7, **places)
    assert "".join(pieces) == expected["text"]
    run = attnlm.train(resume=name, steps=9, data_dir=data_dir, **places)
    # What dropout drops is drawn otherwise since.
    bound = 1e-3 if run.config.model.dropout else 1e-4
    assert run.metrics()[-1]["val_loss"] == pytest.approx(expected["resumed"], rel=bound)


def test_what_is_resumed_is_written_under_the_names_of_today(folder: Path) -> None:
    name = "transformer"
    places: Any = {"checkpoint_dir": folder / "runs"}
    run = attnlm.open_run(name, **places)
    with pytest.raises(AttnlmError, match="older version"):
        as_script(run, "the", checkpoint="last")
    assert attend(run, "the", checkpoint="last").weights.shape == (2, 2, 3, 3)
    run = attnlm.train(resume=name, steps=9, data_dir=folder / "datasets", **places)
    assert "forward(weights, ids)" in as_script(run, "the", checkpoint="last")
