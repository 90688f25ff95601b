"""`python -m benchmarks.cuda`: GPT-2's shape (124M parameters) on GPUs, as one table.

Compares a bfloat16 training step with nanoGPT's under torch.compile, on one GPU and on all GPUs;
measures the fraction of the GPU's measured peak, and sampling. NANOGPT names a checkout of nanoGPT;
without it the table has our side only. Without a GPU the program says so in one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attnlm.compute.device import Device, choose_device
from attnlm.config.settings import resolve
from attnlm.generation.decoders import fastest_decoding
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import LanguageModel
from benchmarks.nanogpt import Shape, model_of, steps_per_second
from benchmarks.table import Row
from tests.models import parts_of

GPT2 = Shape(12, 768, 12, 1024, 12, 50257)
_SECONDS, _MATMUL = 5.0, 8192
_TOKENS, _SAMPLES = 200, (1, 64)


def main() -> None:
    """Print the table, or the reason why it cannot be made."""
    if not torch.cuda.is_available():
        print("no GPU to measure: PyTorch finds no CUDA device")
        return
    count = torch.cuda.device_count()
    title = f"{count} × {torch.cuda.get_device_name()}, torch {torch.__version__}"
    table = Table("measured", "attnlm", "nanoGPT, torch.compile", "ratio", title=title)
    for row in rows(choose_device("cuda"), GPT2, count, os.environ.get("NANOGPT")):
        table.add_row(*row)
    Console(width=120).print(table)


def rows(device: Device, shape: Shape, count: int, checkout: str | None) -> Iterator[Row]:
    """Yield the rows of the table, for one device and for `count` devices."""
    rival = None if checkout is None else _Rival(Path(checkout), shape, device)
    theirs = 0.0 if rival is None else shape.tokens * steps_per_second(rival.step, _SECONDS)
    one, flops = planned(shape, device, 1)
    peak = peak_of_matmuls(device)
    share = f"{one:,.0f} ({flops / peak:.0%} of {peak / 1e12:,.1f} TFLOP/s)"
    yield _row(f"step of gpt2, {shape}: tokens/s", one, theirs, share)
    if count > 1:
        several, _ = planned(shape, device, count)
        beside = f"1 GPU {one:,.0f}"
        yield Row(f"{count} GPUs: tokens/s", f"{several:,.0f}", beside, f"{several / one:.2f}")
    model = _model(shape).to(device.torch).eval()
    for samples in _SAMPLES:
        ours = _speed(lambda n=samples: _sampled(model, device, n), device)  # type: ignore[misc]
        theirs = 0.0
        if rival is not None:
            theirs = _speed(lambda n=samples: rival.sampled(n), device)  # type: ignore[misc]
        name = f"sampling, {samples} × {_TOKENS} tokens: tokens/s"
        yield _row(name, ours, theirs, f"{ours:,.0f}")


def _row(name: str, ours: float, theirs: float, shown: str) -> Row:
    beside, ratio = ("NANOGPT is not set", "–") if not theirs else (f"{theirs:,.0f}", "")
    return Row(name, shown, beside, ratio or f"{ours / theirs:.2f}")


def planned(shape: Shape, device: Device, count: int) -> tuple[float, float]:
    """Return tokens per second of all, and FLOP/s of each, as `attnlm plan` measures them."""
    launch = [sys.executable, "-m"]
    if count > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
    on_gpu = ["--dtype", "bfloat16", "--compile", "on"] if device.name == "cuda" else []
    sizes = {
        "layers": shape.layers,
        "embed-dim": shape.width,
        "heads": shape.heads,
        "block-size": shape.context,
        "batch-size": shape.batch * count,
        "vocab-size": shape.vocab_size,
        "tokens": 10**9,
    }
    command = [
        *(*launch, "attnlm", "plan", "--json", "--model", "gpt2", "--optimizer", "adamw"),
        *("--device", device.name, *on_gpu),
        *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    return float(found["tokens_per_second"]), float(found["flops_per_second"])


def peak_of_matmuls(device: Device, size: int = _MATMUL) -> float:
    """Return the FLOP/s of large matmuls in bfloat16."""
    one = torch.ones(size, size, dtype=torch.bfloat16, device=device.torch)

    def multiply(number: int) -> None:
        torch.mm(one, one)
        _wait_for(device)

    return 2 * size**3 * steps_per_second(multiply, 1.0)


def _model(shape: Shape) -> LanguageModel:
    sizes = {"layers": shape.layers, "embed_dim": shape.width, "heads": shape.heads}
    config = resolve({"model": "gpt2", "block_size": shape.context, **sizes})
    return parts_of(config).build(shape.vocab_size)


def _sampled(model: LanguageModel, device: Device, samples: int) -> int:
    config = SamplingConfig(tokens=_TOKENS, num_samples=samples, seed=1)
    blocks = fastest_decoding(model, device).generate([0], config)
    return sum(block_TB.size for block_TB in blocks)


def _speed(sampled: Callable[[], int], device: Device) -> float:
    """Return tokens per second of the second call."""
    sampled()
    _wait_for(device)
    began = time.perf_counter()
    count = sampled()
    _wait_for(device)
    return count / (time.perf_counter() - began)


def _wait_for(device: Device) -> None:
    if device.name == "cuda":
        torch.cuda.synchronize()


class _Rival:
    """nanoGPT's training step in bfloat16 with torch.compile and the fused AdamW."""

    def __init__(self, checkout: Path, shape: Shape, device: Device) -> None:
        self._device = device
        self._model = model_of(checkout, shape).to(device.torch)
        self._optimizer = self._model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.name)
        self._compiled: Any = torch.compile(self._model)
        ids = torch.randint(shape.vocab_size, (shape.batch, shape.context + 1))
        self._batch = ids[:, :-1].to(device.torch), ids[:, 1:].to(device.torch)

    def step(self, number: int) -> None:
        """Make one training step."""
        with torch.autocast(self._device.name, torch.bfloat16):
            _, loss = self._compiled(*self._batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        _wait_for(self._device)

    def sampled(self, samples: int) -> int:
        """Generate text without torch.compile, as nanoGPT's sample.py does by default."""
        first = torch.zeros(samples, 1, dtype=torch.long, device=self._device.torch)
        with torch.autocast(self._device.name, torch.bfloat16):
            self._model.generate(first, _TOKENS)
        return samples * _TOKENS


if __name__ == "__main__":
    main()
