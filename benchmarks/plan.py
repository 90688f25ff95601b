"""Compare what `plan` predicts with measurements: memory, FLOPs and time of the steps."""

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

from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from benchmarks.table import Row, attnlm
from tests.models import parts_of

_BYTE_PAIRS = "--block-size 256 --batch-size 4 --optimizer adamw"
CONFIGURATIONS = {
    "--model multi-head": 2000,
    "--model wide-head --embed-dim 256": 60,
    "--model transformer": 200,
    "--model gpt2 --layers 4": 150,
    "--model transformer --layers 4 --embed-dim 256 --heads 8 --block-size 256": 20,
    "--model transformer --layers 6 --embed-dim 384 --heads 6 --block-size 256 --batch-size 8 "
    "--optimizer adamw": 12,
    "--model llama --layers 8 --embed-dim 256 --heads 8 --kv-heads 2 --block-size 512 "
    "--batch-size 8 --micro-batch-size 4": 12,
    "--model gpt2 --layers 4 --embed-dim 256 --block-size 256 --dropout 0.1": 20,
    "--model transformer --embed-dim 768 --heads 12 --batch-size 8": 20,
    f"--model gpt2 --layers 4 --embed-dim 256 {_BYTE_PAIRS}": 20,
    "--model transformer --layers 4 --embed-dim 256 --heads 8 --block-size 256 --processes 2": 20,
}
"""Options, and how many steps are made. GPT-2's vocabulary is for `_BYTE_PAIRS`."""


def plan(dataset: Dataset, text: Path) -> list[Row]:
    """A row for each configuration: predicted, measured, and by how much they differ."""
    rows = []
    byte_pairs: Dataset | None = None
    for words, steps in CONFIGURATIONS.items():
        data, options = dataset, words.split()
        if words.endswith(_BYTE_PAIRS):
            folder = dataset.path.parent
            data = byte_pairs = byte_pairs or prepare(text, tokenizer="gpt2", data_dir=folder)
        options = [str(data.path), "--device", "cpu", *options, "--steps", str(steps)]
        planned = _output(attnlm("plan", *options, "--json"))
        measured = _measured(options, planned["settings"]["processes"], steps)
        pairs = [
            (planned["memory"] / 1e6, measured["bytes"] / 1e6, "MB"),
            (planned["training_flops_per_token"] / 1e6, _counted(planned), "MFLOP/token"),
            (planned["seconds"], planned["tokens"] / measured["tokens_per_second"], "s"),
        ]
        rows.append(
            Row(
                f"plan, {words}",
                ", ".join(f"{ours:.3g} {unit}" for ours, _, unit in pairs),
                "measured " + ", ".join(f"{theirs:.3g} {unit}" for _, theirs, unit in pairs),
                ", ".join(f"{ours / theirs - 1:+.0%}" for ours, theirs, _ in pairs),
            )
        )
    return rows


def _measured(options: list[str], count: int, steps: int) -> dict[str, Any]:
    """Time the second half of the steps, with three evaluations on part of the split."""
    python, module = [sys.executable, "-m"], "benchmarks.measured_training"
    command = [*python, module]
    if count > 1:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*python, *torchrun, "-m", module]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    more = ["--eval-every", str(steps // 2), "--eval-tokens", "8192", "--seed", "1"]
    return _output([*command, *options, *more], OMP_NUM_THREADS=threads)


def _output(command: list[str], **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **variables},
    )
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def _counted(planned: dict[str, Any]) -> float:
    """Return the megaFLOPs per token that PyTorch counts for the reference implementation."""
    model = parts_of(resolve({}, planned["settings"])).build(planned["vocab_size"])
    ids = torch.zeros((1, model.architecture.block_size), dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(ids, ids).backward()
    return float(counter.get_total_flops()) / ids.numel() / 1e6
