"""What attnlm 1.0.0 wrote still loads, evaluates, samples and resumes to the same numbers.

tests/older holds small runs of that version, and what it made of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import attnlm

OLDER = Path(__file__).parent / "older"
EXPECTED: dict[str, dict[str, Any]] = json.loads((OLDER / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_an_older_run_evaluates_samples_and_resumes(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLDER, tmp_path / "older"))
    places: Any = {"checkpoint_dir": folder / "runs"}
    expected = EXPECTED[name]
    data_dir = folder / "datasets"
    assert attnlm.evaluate(name, data_dir=data_dir, **places).loss == pytest.approx(
        expected["loss"], rel=1e-5
    )
    pieces = attnlm.sample(name, tokens=40, seed=3, temperature=0.7, **places)
    assert "".join(pieces) == expected["text"]
    run = attnlm.train(resume=name, steps=9, data_dir=data_dir, **places)
    assert run.metrics()[-1]["val_loss"] == pytest.approx(expected["resumed"], rel=1e-4)
    assert len(run.ticker()) == len(run.metrics())
