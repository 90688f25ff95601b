"""Train rungs and recipes with five seeds; report the median and the spread of their losses."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import attnlm as library
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import RUNGS
from benchmarks.table import Row

RECIPES = (
    *("r2-bigram", "r2-single-head", "r2-multi-head", "r3-bigram", "r5-wide-heads"),
    *("multi-head-fast", "shakespeare-fast"),
)
SEEDS = range(1, 1 + int(os.environ.get("SEEDS", 5)))


def losses(dataset: Dataset, text: Path) -> list[Row]:
    """Return losses over the whole validation split at the last evaluation; LOSSES selects rows."""
    rows = []
    for name in os.environ.get("LOSSES", " ".join((*RUNGS, *RECIPES))).split():
        seconds, found = [], []
        for seed in SEEDS:
            chosen: Any = {"recipe": name} if name in RECIPES else {"model": name}
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                run = library.train(dataset, checkpoint_dir=folder, seed=seed, **chosen)
                seconds.append(time.perf_counter() - began)
                found.append(run.metrics()[-1]["val_loss"])
        median = statistics.median(found)
        spread = f"{median:.4f}, {min(found):.4f}–{max(found):.4f}, {len(found)} seeds"
        rows.append(Row(f"{name}: loss", spread, f"{statistics.median(seconds):.1f} s", "–"))
    return rows
