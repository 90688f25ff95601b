"""Small data and runs that the trials share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import attnlm
from tests.trials.internals import Run, Stepper, checkpoint

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


def prepared(folder: Path, tokenizer: str = "char") -> Path:
    """Prepare TEXT in `folder`; return the path of the data set."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fruits.txt").write_text(TEXT)
    return attnlm.prepare(folder / "fruits.txt", data_dir=folder / "data", tokenizer=tokenizer).path


def settings_of(rung: str, **settings: Any) -> dict[str, Any]:
    """Return SMALL for a rung, without what the rung has no use for."""
    chosen = {**SMALL, "model": rung, **settings}
    if rung == "bigram":
        del chosen["embed_dim"]
    return chosen


@contextlib.contextmanager
def around_steps(
    before: Callable[[Any], object] = lambda stepper: None,
    after: Callable[[Any], object] = lambda stepper: None,
) -> Iterator[None]:
    """Call `before` and `after` with the Stepper around each training step of this process."""
    original = Stepper.step

    def step(self: Stepper) -> torch.Tensor:
        before(self)
        loss = original(self)
        after(self)
        return loss

    with mock.patch.object(Stepper, "step", step):
        yield


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors."""
    with safe_open(str(checkpoint), framework="pt") as file:
        return dict(json.loads(file.metadata()["facts"]))


def seal(path: Path, tensors: dict[str, torch.Tensor], facts: object) -> None:
    """Write a checkpoint whose digest is right."""
    described = json.dumps(facts)
    metadata = {"facts": described, "digest": checkpoint._digest(described, tensors)}
    save_file(tensors, str(path), metadata)


def same_run(one: Run, other: Run) -> str | None:
    """Return how two runs differ, apart from the time they took, or None."""
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
            first, second = (_tensors(run, which) for run in (one, other))
            if {n: t.tolist() for n, t in first.items()} != {
                n: t.tolist() for n, t in second.items()
            }:
                return f"other numbers in {which}"
        elif facts_of(ours) != facts_of(theirs):
            return f"other facts in {which}"
        elif ours.read_bytes() != theirs.read_bytes():
            return f"other bytes in {which}"
    return None


def _tensors(run: Run, which: str) -> dict[str, torch.Tensor]:
    path, architecture = run.path / which, run.config.model
    _, weights, state = checkpoint.load_checkpoint(path, architecture, run.vocab_size)
    return checkpoint.named_tensors(weights, state)
