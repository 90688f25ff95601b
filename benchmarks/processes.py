"""Two processes of one thread each beside one process of two threads, with the same batches."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
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


def _speed(dataset: Dataset, shape: list[str], count: int, threads: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "attnlm", "train", str(dataset.path), *shape, "--quiet"),
            *("--processes", str(count), "--threads", str(threads), "--seed", "1"),
            *("--eval-tokens", "1000", "--checkpoint-dir", folder, "--name", "run"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        return float(json.loads(lines[-1])["tokens_per_second"])
