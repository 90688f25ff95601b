"""Compare the loss of recipe best with other recipes after the same training time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import attnlm as library
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import MODELS
from benchmarks.table import Row, attnlm
from tests.models import parts_of

BUDGETS = os.environ.get("BUDGETS", "30s 2m 5m").split()
RIVALS = os.environ.get("RIVALS", "transformer shakespeare-best").split()
SEEDS = range(1, 1 + int(os.environ.get("SEEDS", 1)))


def best(dataset: Dataset, text: Path) -> list[Row]:
    """Losses over the whole split, on Tiny Shakespeare and the texts that TEXTS names.

    TEXTS is like `book.md code.txt:bpe:1024`: each with its tokenizer, or characters.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        datasets = [dataset]
        for named in os.environ.get("TEXTS", "").split():
            path, _, tokenizer = named.partition(":")
            made = library.prepare(path, tokenizer=tokenizer or "char", data_dir=folder)
            datasets.append(made)
        for data in datasets:
            for budget in BUDGETS:
                losses, size = _losses(data, "best", budget)
                rivals = {name: _losses(data, name, budget)[0] for name in RIVALS}
                told = ", ".join(f"{name} {_spread(found)}" for name, found in rivals.items())
                least = min(map(statistics.median, rivals.values()), default=float("nan"))
                gained = f"{least - statistics.median(losses):+.4f} nats"
                name = f"{data.name} ({data.tokenizer.name}), {budget}"
                rows.append(Row(name, f"{_spread(losses)}: {size}", told, gained))
                print(rows[-1], flush=True)
    return rows


def _losses(dataset: Dataset, name: str, budget: str) -> tuple[list[float], str]:
    """Return the validation loss for each seed, and the size of the model."""
    which = ["--model", name] if name in MODELS else ["--recipe", name]
    losses, size = [], ""
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            flags = [*which, "--budget", budget, "--seed", str(seed), "--checkpoint-dir", folder]
            command = attnlm("train", str(dataset.path), *flags, "--json")
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            facts: dict[str, Any] = json.loads(done.stdout)
            whole = facts["whole"].get("best", {})
            losses.append(whole.get("val_loss", facts["best_val_loss"]))
            model = parts_of(library.open_run(facts["run"]).config)
        size = f"{model.layers} × {model.embed_dim}, dropout {model.dropout:g}"
    return losses, size


def _spread(losses: list[float]) -> str:
    median = f"{statistics.median(losses):.4f}"
    return median if len(losses) == 1 else f"{median}, {min(losses):.4f}–{max(losses):.4f}"
