"""What `plan` predicts beside what training takes: memory, operations, time of the steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model.architecture import Architecture
from attnlm.model.language_model import build_model
from benchmarks.table import Row, attnlm

CONFIGURATIONS: list[dict[str, Any]] = [
    {"model": "multi-head", "steps": 2000},
    {"model": "wide-head", "embed_dim": 256, "steps": 60},
    {"model": "transformer", "steps": 200},
    {"model": "gpt2", "layers": 4, "steps": 150},
    {
        **{"model": "transformer", "layers": 4, "embed_dim": 256, "heads": 8},
        **{"block_size": 256, "batch_size": 16, "steps": 20},
    },
    {
        **{"model": "transformer", "layers": 6, "embed_dim": 384, "heads": 6},
        **{"block_size": 256, "batch_size": 8, "steps": 12, "optimizer": "adamw"},
    },
    {
        **{"model": "llama", "layers": 8, "embed_dim": 256, "heads": 8, "kv_heads": 2},
        **{"block_size": 512, "batch_size": 8, "micro_batch_size": 4, "steps": 12},
    },
    {
        **{"model": "gpt2", "layers": 4, "embed_dim": 256, "heads": 4, "dropout": 0.1},
        **{"block_size": 256, "batch_size": 16, "steps": 20},
    },
    {
        **{"model": "transformer", "layers": 2, "embed_dim": 768, "heads": 12},
        **{"block_size": 128, "batch_size": 8, "steps": 20},
    },
    {
        **{"model": "gpt2", "layers": 4, "embed_dim": 256, "heads": 4, "vocabulary": "gpt2"},
        **{"block_size": 256, "batch_size": 4, "steps": 20, "optimizer": "adamw"},
    },
    {
        **{"model": "transformer", "layers": 4, "embed_dim": 256, "heads": 8, "processes": 2},
        **{"block_size": 256, "batch_size": 16, "steps": 20},
    },
]


def plan(dataset: Dataset, text: Path) -> list[Row]:
    """A row for each configuration: predicted, measured, and by how much they differ."""
    rows = []
    byte_pairs: Dataset | None = None
    for configuration in CONFIGURATIONS:
        settings = dict(configuration)
        data = dataset
        if settings.pop("vocabulary", None) == "gpt2":
            folder = dataset.path.parent
            data = byte_pairs = byte_pairs or prepare(text, tokenizer="gpt2", data_dir=folder)
        planned = _planned(data, settings)
        measured = _measured(data, settings)
        tokens = planned["tokens"]
        pairs = [
            (planned["memory"] / 1e6, measured["bytes"] / 1e6, "MB"),
            (planned["training_flops_per_token"] / 1e6, _counted(planned), "MFLOP/token"),
            (planned["seconds"], tokens / measured["tokens_per_second"], "s"),
        ]
        rows.append(
            Row(
                f"plan, {_in_words(configuration)}",
                ", ".join(f"{ours:.3g} {unit}" for ours, _, unit in pairs),
                "measured " + ", ".join(f"{theirs:.3g} {unit}" for _, theirs, unit in pairs),
                ", ".join(f"{ours / theirs - 1:+.0%}" for ours, theirs, _ in pairs),
            )
        )
    return rows


def _planned(data: Dataset, settings: dict[str, Any]) -> dict[str, Any]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = attnlm("plan", str(data.path), "--device", "cpu", "--json", *options)
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def _measured(data: Dataset, settings: dict[str, Any]) -> dict[str, float]:
    """Of the steps alone; one evaluation in the end, of a part of the split."""
    count = settings.get("processes", 1)
    command = [sys.executable, "-m", "benchmarks.measured_training"]
    if count > 1:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*command[:2], *torchrun, "-m", "benchmarks.measured_training"]
    settings = {**settings, "eval_every": settings["steps"], "eval_tokens": 8192}
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    done = subprocess.run(
        [*command, str(data.path), json.dumps(settings)],
        **{"check": True, "stdout": subprocess.PIPE, "encoding": "utf-8", "env": environment},
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _counted(planned: dict[str, Any]) -> float:
    """Millions of operations that PyTorch counts in the plain form, for each token."""
    names = Architecture.__dataclass_fields__
    model = build_model(
        Architecture(**{k: v for k, v in planned["settings"].items() if k in names}),
        planned["vocab_size"],
    )
    ids = torch.zeros((1, model.architecture.block_size), dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(ids, ids).backward()
    return counter.get_total_flops() / ids.numel() / 1e6


def _in_words(configuration: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in configuration.items() if k != "steps")
