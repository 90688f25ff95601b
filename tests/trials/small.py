"""Small data and runs that the trials share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnlm
from tests.trials.internals import Run, checkpoint

TEXT = "".join(f"{i} apples and {i + 1} pears are {2 * i + 1} fruits.\n" for i in range(60))
SMALL: dict[str, Any] = {
    "embed_dim": 16,
    "block_size": 8,
    "batch_size": 4,
    "steps": 12,
    "eval_every": 4,
    "seed": 1,
    "threads": 1,
    "device": "cpu",
}


def prepared(folder: Path) -> Path:
    """A data set in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fruits.txt").write_text(TEXT)
    return attnlm.prepare(folder / "fruits.txt", data_dir=folder / "data").path


def settings_of(rung: str, **settings: Any) -> dict[str, Any]:
    """SMALL for a rung, less what it has no use for."""
    chosen = {**SMALL, "model": rung, **settings}
    if rung == "bigram":
        del chosen["embed_dim"]
    return chosen


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    from safetensors import safe_open

    with safe_open(str(checkpoint), framework="pt") as file:
        return dict(json.loads(file.metadata()["facts"]))


def same_run(one: Run, other: Run) -> str | None:
    """How two runs differ but in the time they took, or None."""
    records = [
        [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_second")} for r in rs]
        for rs in (one.metrics(), other.metrics())
    ]
    if records[0] != records[1]:
        return "other metrics"
    tickers = [(run.path / "ticker.jsonl").read_bytes() for run in (one, other)]
    if tickers[0] != tickers[1]:
        return "another ticker"
    for which in ("best", "last"):
        ours, theirs = (run.checkpoint(which).path for run in (one, other))
        if ours.is_dir():  # a sharded one, whose files have an order of their own
            if not _same_tensors(_tensors(one, which), _tensors(other, which)):
                return f"other numbers in {which}"
            continue
        if facts_of(ours) != facts_of(theirs):
            return f"other facts in {which}"
        if ours.read_bytes() != theirs.read_bytes():
            return f"other bytes in {which}"
    return None


def _tensors(run: Run, which: str) -> dict[str, Tensor]:
    _, weights, state = checkpoint.load_checkpoint(
        run.path / which, run.config.model, run.vocab_size
    )
    return checkpoint.named_tensors(weights, state)


def _same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
