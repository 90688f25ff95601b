"""`python -m benchmarks [PART…]`: ours and its rivals in the same run, as one table.

Parts: steps, losses, best, choices, process, quality, shakespeare, transformer, growth, vocabulary,
subnormals, busy, processes, sharding, plan, sample, speaking, prepare, pages.
ATTNLM_TEST_DATA names a folder with tinyshakespeare.txt; NANOGPT, where it is set, a checkout of
nanoGPT, and TIKTOKEN_CACHE_DIR a folder with GPT-2's vocabulary. PROCESSOR=AVX2 limits both sides
to the instructions of an older processor, one of `make processors`. Run it on a quiet machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from attnlm.workflows.speed_check import peak_matmul_speed
from benchmarks import (
    best,
    busy_machine,
    gpt2_generation,
    growth,
    kernel_choice,
    losses,
    pages,
    plan,
    preparation,
    processes,
    sampling,
    subnormals,
    training,
    transformer,
)
from tests.on_processors import limited

PARTS = {
    "steps": training.steps,
    "losses": losses.losses,
    "best": best.best,
    "choices": kernel_choice.choices,
    "process": training.process,
    "quality": training.quality,
    "shakespeare": training.shakespeare,
    "transformer": transformer.transformer,
    "growth": growth.growth,
    "vocabulary": transformer.vocabulary,
    "subnormals": subnormals.subnormals,
    "busy": busy_machine.busy,
    "processes": processes.processes,
    "sharding": processes.sharding,
    "plan": plan.plan,
    "sample": sampling.sample,
    "speaking": gpt2_generation.speaking,
    "prepare": preparation.prepare,
    "pages": pages.pages,
}


def main() -> None:
    """Measures the parts that were named, or all."""
    if (limit := os.environ.pop("PROCESSOR", None)) is not None:
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(subprocess.run(command, env=limited(limit, Path(folder))).returncode)
    named = sys.argv[1:] or list(PARTS)
    unknown = set(named) - set(PARTS)
    if unknown:
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    text = Path(os.environ.get("ATTNLM_TEST_DATA", ".")) / "tinyshakespeare.txt"
    if not text.is_file():
        sys.exit("ATTNLM_TEST_DATA must name a folder with tinyshakespeare.txt in it")
    table = Table("measured", "attnlm", "beside", "ratio", title=_machine())
    with tempfile.TemporaryDirectory() as folder:
        dataset = training.prepared(text, Path(folder))
        for part in named:
            for row in PARTS[part](dataset, text):
                table.add_row(*row)
    Console(width=120).print(table)


def _machine() -> str:
    peak = peak_matmul_speed(os.cpu_count() or 1) / 1e9
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{_processor()}, {os.cpu_count()} cores, {capability}, {peak:.0f} GFLOP/s in float32 "
        f"matmuls, torch {torch.__version__}"
    )


def _processor() -> str:
    """Return the name of the processor as the system reports it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
