"""The benchmarks: how they measure two programs, and commands that attnlm accepts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attnlm.data.dataset import Dataset
from benchmarks import measure, sampling, training
from benchmarks.__main__ import PARTS
from benchmarks.measure import SEED, Bench
from benchmarks.nanogpt import Shape
from tests.kit import command

SHAPE = Shape(1, 8, 2, 16, 2)
BENCH = Bench(Path(), Path(), Path(), None, rounds=1, seconds=0.0)


def printing(figures: str) -> list[str]:
    """Return a command that prints an expression of its round as JSON, and something before it."""
    program = f"import json, sys; n = int(sys.argv[1]); print('log'); print(json.dumps({figures}))"
    return [sys.executable, "-c", program, SEED]


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    ours = printing('{"tokens_per_second": [9000, 10, 40, 90][n], "mib": 4.0}')
    rival = printing('{"tokens_per_second": [1, 10, 10, 10][n], "mib": 8.0}')
    speed, memory = measure.compare("name", ["tokens_per_second", "mib"], ours, rival, rounds=3)
    assert speed == ("name", "40 tokens/s (10–90)", "10 tokens/s (10–10)", "4.00 (1.00–9.00)")
    assert memory.ratio == "2.00 (2.00–2.00)"


def test_whole_processes_are_timed_and_a_missing_rival_has_a_reason() -> None:
    ours = printing('{"val_loss": 1 + n / 10}')
    (row,) = measure.compare("name", ["process_seconds"], ours, "not there", rounds=2)
    assert row.rival == "not there" and row.ratio == "–"
    assert re.fullmatch(r"\d\.\d\d s \(.*\), to a loss of 1\.150 \(1\.100–1\.200\)", row.ours)
    found = measure.measure([sys.executable, "-c", ""])
    assert 0 < found["process_seconds"] < 60 and 1 < found["mib"] < 500


def test_a_program_that_fails_ends_the_benchmark_with_its_error() -> None:
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        measure.measure([sys.executable, "-c", "1 / 0"])


@pytest.mark.documents
@pytest.mark.parametrize("part", ["steps", "growth", "busy", "sample", "gpu"])
def test_the_commands_of_a_part_are_accepted(
    part: str, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of attnlm run in this process, with a few steps; other programs do not run."""
    ran = []

    def measured(words: Sequence[str], round_number: int = 0) -> dict[str, Any]:
        figures: dict[str, Any] = {"tokens_per_second": 1.0}
        if words[:3] != [sys.executable, "-m", "attnlm"]:
            return figures
        ran.append(words)
        done = command(
            *(str(round_number) if word == SEED else word for word in words[3:]), cwd=tmp_path
        )
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    for module in (measure, training, sampling):
        monkeypatch.setattr(module, "measure", measured)
    monkeypatch.setattr(training, "SHAPES", (SHAPE,))
    monkeypatch.setattr(training, "AXES", {"layers": (1,), "context": (8,)})
    monkeypatch.setattr(training, "BASE", SHAPE)
    monkeypatch.setattr(training, "BUSY", {"bigram": "model"})
    monkeypatch.setattr(training, "matmul_speed", lambda *_: 1e12)
    monkeypatch.setattr(sampling, "_imported", lambda bench: iter(()))
    monkeypatch.chdir(tmp_path)
    bench = Bench(tmp_path, dataset.path, tmp_path, tmp_path, rounds=1, seconds=0.0)
    rows = list(PARTS[part](bench) if part != "gpu" else training.gpu_rows(bench, SHAPE, "cpu", 2))
    assert ran and len(rows) > 1
    if part == "growth":
        assert (tmp_path / "build" / "growth.png").is_file()


def test_a_missing_gpu_is_reported() -> None:
    assert [row.ours for row in training.gpu(BENCH)] == ["PyTorch finds no CUDA device"]
