"""Measure how steadily the exam's standard model learns each task: one line of JSON per training.

python tools/calibrate_exam.py OUTPUT.jsonl SUITE.json SEED…
SUITE.json is a list of records: `task`, its `size`, `steps`, and further settings of the training.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import attnlm
from attnlm.text.tasks import TASKS

STANDARD = {
    "model": "transformer",
    "positions": "learned",
    "layers": 2,
    "embed_dim": 64,
    "heads": 4,
    "batch_size": 64,
    "examples_per_window": 1,
    "schedule": "constant",
    "warmup": 10,
    "threads": 1,
    "device": "cpu",
    "eval_tokens": 8192,
}


def measure(row: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Train the standard model on a task, and return its scores at each evaluation."""
    task, size = row["task"], row["size"]
    sizes = {TASKS[task].setting: size} if TASKS[task].setting else {}
    dataset = attnlm.prepare(
        task, name=f"{task}-{size}", data_dir=folder / "data", examples=row["examples"], **sizes
    )
    assert dataset.val_examples is not None
    block_size = dataset.val_examples.longest - 1
    given = {k: v for k, v in row.items() if k not in ("task", "size", "examples", "label")}
    found: list[Any] = []
    began = time.perf_counter()
    attnlm.train(
        dataset,
        **{"block_size": block_size, **STANDARD, **given, "seed": seed},
        checkpoint_dir=folder / "checkpoints",
        on_event=lambda event: found.append(event) if isinstance(event, attnlm.Evaluated) else None,
    )
    seconds = time.perf_counter() - began
    return {
        **row,
        "seed": seed,
        "seconds": round(seconds, 1),
        "steps_at": [e.step for e in found],
        "loss": [round(e.val_loss, 4) for e in found],
        "accuracy": [round(e.accuracy, 4) for e in found],
        "guess": dataset.bigram_loss,
    }


def main() -> None:
    output, suite, *seeds = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, seeds):
            for row in json.loads(Path(suite).read_text()):
                line = json.dumps(measure({"examples": 20000, **row}, seed, Path(folder)))
                with Path(output).open("a") as file:
                    print(line, file=file)


if __name__ == "__main__":
    main()
