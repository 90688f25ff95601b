"""Training on 2 GiB of ids in 32 shards beside training on one small bin: the same work."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from attnlm.data.dataset import Dataset
from attnlm.data.shards import Shards, file_name
from benchmarks.table import Row, in_turn
from benchmarks.training import speed, stepper_of

_SHARDS, _SHARD_BYTES = 32, 2**26
_STEPS = {"r2-multi-head": 3000, "multi-head-fast": 1000, "shakespeare-fast": 60}
_ROUNDS = 5


def shards(dataset: Dataset, text: Path) -> list[Row]:
    """Steps per second of three recipes, windows shuffled over all of the text."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        many = replace(dataset, train=_written(np.asarray(dataset.train), Path(folder)))
        for recipe, steps in _STEPS.items():
            ours, one = stepper_of(many, recipe), stepper_of(dataset, recipe)
            for stepper in (ours, one):
                speed(stepper, steps)
            tokens = ours.batches.batch_size * ours.batches.block_size
            sharded, small, ratio = in_turn(
                lambda ours=ours, steps=steps: speed(ours, steps),  # type: ignore[misc]
                lambda one=one, steps=steps: speed(one, steps),  # type: ignore[misc]
                _ROUNDS,
            )
            rows.append(
                Row(
                    f"{recipe}: 32 shards of 64 MiB",
                    f"{sharded * tokens:,.0f} tokens/s",
                    f"one bin of 2 MB {small * tokens:,.0f} tokens/s",
                    f"{ratio:.3f}",
                )
            )
    return rows


def _written(ids: np.ndarray[tuple[int], np.dtype[np.uint16]], folder: Path) -> Shards:
    """The ids over and over, a little further on in each shard."""
    size = _SHARD_BYTES // ids.itemsize
    parts = []
    for number in range(_SHARDS):
        path = folder / file_name("train", number)
        with path.open("wb") as file:
            np.resize(np.roll(ids, number), size).tofile(file)
            os.fsync(file.fileno())  # or the system would write while steps are timed
        parts.append(np.memmap(path, ids.dtype, mode="r"))
    return Shards(parts)
