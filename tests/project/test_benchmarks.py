"""The GPU benchmark, run on a CPU with a tiny shape."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnlm.compute.device import Device
from benchmarks import cuda
from benchmarks.nanogpt import Shape
from tests.command import attnlm

SHAPE = Shape(1, 8, 2, 16, 2, 11)


def test_the_benchmark_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    cuda.main()
    assert capsys.readouterr().out == "no GPU to measure: PyTorch finds no CUDA device\n"


@pytest.mark.parametrize("rival", [None, "nanoGPT"])
def test_the_table_of_gpus(
    rival: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        arguments = command[command.index("attnlm") + 1 :]
        return SimpleNamespace(stdout=attnlm(*arguments, cwd=tmp_path).stdout)

    monkeypatch.setattr(cuda, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(cuda, "_SECONDS", 0.01)
    monkeypatch.setattr(cuda, "peak_of_matmuls", lambda device: 1e15)
    stub = SimpleNamespace(step=lambda number: None, sampled=lambda samples: samples)
    monkeypatch.setattr(cuda, "_Rival", lambda *_: stub)
    rows = list(cuda.rows(Device("cpu", "float32", "tests"), SHAPE, 2, rival))
    assert [row.name.split(",")[0] for row in rows] == [
        "step of gpt2",
        "2 GPUs: tokens/s",
        "sampling",
        "sampling",
    ]
    assert all((row.ratio == "–") == (rival is None) for row in rows if row is not rows[1])
    assert "--nproc-per-node=2" in commands[1] and commands[1].count("4") == 1  # the batch size
    assert "--nproc-per-node=2" not in commands[0]
