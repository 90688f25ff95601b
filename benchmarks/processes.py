"""Compare two processes of one thread with one process of two threads, on the same batches; and
sharded weights with replicated weights in two processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnlm.data.dataset import Dataset
from benchmarks.table import Row

ROUNDS = 3
SHAPES = {
    "multi-head": ["--model", "multi-head", "--steps", "2000"],
    "transformer": ["--model", "transformer", "--steps", "200"],
    "4 × 192, context 256, batch 16": [
        *("--model", "transformer", "--layers", "4", "--embed-dim", "192", "--heads", "6"),
        *("--block-size", "256", "--batch-size", "16", "--steps", "40"),
    ],
}
TINY = ["--layers", "1", "--embed-dim", "64"]
LARGE = ["--layers", "8", "--embed-dim", "1024"]
SHARDED = [
    *("--model", "transformer", "--heads", "8"),
    *("--block-size", "64", "--batch-size", "16", "--steps", "4", "--eval-every", "2"),
    *("--optimizer", "adamw", "--learning-rate", "0.0001"),
]
FORMS = {"whole": [], "--shard": ["--shard"], "--shard --recompute": ["--shard", "--recompute"]}
_MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def processes(dataset: Dataset, text: Path) -> list[Row]:
    """Tokens per second of the last tenth of the steps, as the run recorded it."""
    rows = []
    for name, shape in SHAPES.items():
        pairs = [
            (_speed(dataset, shape, 2, 1), _speed(dataset, shape, 1, 2)) for _ in range(ROUNDS)
        ]
        ours, beside = (statistics.median(side) for side in zip(*pairs, strict=True))
        rows.append(
            Row(
                f"training, {name}: 2 processes, 1 thread each",
                f"{ours:,.0f} tokens/s",
                f"1 process, 2 threads {beside:,.0f} tokens/s",
                f"{statistics.median(a / b for a, b in pairs):.2f}",
            )
        )
    return rows


def sharding(dataset: Dataset, text: Path) -> list[Row]:
    """Return the speed, and the peak memory of a process above that with a tiny model."""
    _, tiny = _run(dataset, [*SHARDED, *TINY], 2, 1)
    results = {name: _run(dataset, [*SHARDED, *LARGE, *more], 2, 1) for name, more in FORMS.items()}
    whole_speed, whole_peak = results["whole"]
    return [
        Row(
            f"100 million parameters, AdamW, 2 processes: {name}",
            f"{speed:,.0f} tokens/s, {peak - tiny:,} MB each",
            f"whole {whole_speed:,.0f} tokens/s, {whole_peak - tiny:,} MB each",
            f"{speed / whole_speed:.2f}, {(peak - tiny) / (whole_peak - tiny):.2f}",
        )
        for name, (speed, peak) in results.items()
        if name != "whole"
    ]


def _speed(dataset: Dataset, shape: list[str], count: int, threads: int) -> float:
    return _run(dataset, shape, count, threads)[0]


def _run(dataset: Dataset, shape: Sequence[str], count: int, threads: int) -> tuple[float, int]:
    """Tokens per second of the last tenth of a training, and the largest process' peak in MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "attnlm", "train", str(dataset.path), *shape, "--quiet"),
            *("--processes", str(count), "--threads", str(threads), "--seed", "1"),
            *("--eval-tokens", "500", "--checkpoint-dir", folder, "--name", "run"),
        ]
        measured = subprocess.run(
            [sys.executable, "-c", _MEASURED, *command], check=True, capture_output=True, text=True
        )
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        speed = float(json.loads(lines[-1])["tokens_per_second"])
        return speed, int(measured.stdout.split()[-1]) // 1024
