"""Compare the transformer's step with nanoGPT's: same shape, batches, optimizer and clipping."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import attnlm as library
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.model.ops.loss import cross_entropy
from attnlm.training.kernel_choice import configured_kernels
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from attnlm.training.validation_loss import validation_loss
from attnlm.workflows.autotune import autotune
from attnlm.workflows.speed_check import peak_matmul_speed
from benchmarks.nanogpt import Shape, steps_per_second
from benchmarks.table import Row, attnlm, in_turn, measured

SHAPES = (
    Shape(4, 128, 4, 64, 12),
    Shape(6, 384, 6, 256, 8),
    Shape(4, 256, 4, 2048, 1),
    Shape(4, 256, 4, 256, 4, 50257),
)
SECONDS = float(os.environ.get("SECONDS_A_ROUND", 4))
ROUNDS = int(os.environ.get("ROUNDS", 5))


def transformer(dataset: Dataset, text: Path) -> list[Row]:
    """Tokens per second of `attnlm train` and of nanoGPT's loop, each in processes of its own.

    The `gpt2` shape and the default transformer, with AdamW at its default rate.
    """
    folder = os.environ.get("NANOGPT")
    if folder is None:
        return [Row("transformer: step", "", "nanoGPT: NANOGPT is not set", "–")]
    peak = peak_matmul_speed(os.cpu_count() or 1)
    rows = []
    for shape in (SHAPES[int(number)] for number in os.environ.get("SHAPES", "0123")):
        data = dataset
        if shape.vocab_size > 65:
            if "TIKTOKEN_CACHE_DIR" not in os.environ:
                rows.append(Row(f"{shape}", "", "TIKTOKEN_CACHE_DIR is not set", "–"))
                continue
            data = library.prepare(text, tokenizer="gpt2", data_dir=dataset.path.parent)
        sizes = map(str, (*shape, SECONDS))
        theirs = [sys.executable, "-m", "benchmarks.nanogpt", folder, *sizes]
        first = float(measured(theirs).stdout)
        for model in ("gpt2", "transformer"):
            command = _command(model, shape, data, steps=round(first * SECONDS / shape.tokens))
            pairs = [(_speed(command), float(measured(theirs).stdout)) for _ in range(ROUNDS)]
            ratios = sorted(own / other for own, other in pairs)
            own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            share = own * _operations_per_token(model, shape) / peak
            rows.append(
                Row(
                    f"{model}, {shape}: tokens/s",
                    f"{own:,.0f} ({share:.0%} of peak)",
                    f"nanoGPT {other:,.0f}",
                    f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})",
                )
            )
            print(rows[-1], flush=True)
    return rows


def _command(model: str, shape: Shape, dataset: Dataset, steps: int) -> list[str]:
    """Return the command that trains a shape; the speed that it reports is of the last `steps`."""
    count = max(10, steps)
    flags = {
        "model": model,
        "layers": shape.layers,
        "embed-dim": shape.width,
        "heads": shape.heads,
        "block-size": shape.context,
        "batch-size": shape.batch,
        "optimizer": "adamw",
        "gradient-clip": 1.0,
        "seed": 1,
        "steps": 2 * count,
        "eval-every": count,
        "eval-tokens": shape.tokens,
        "checkpoint-dir": dataset.path.parent / "checkpoints",
    }
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    tied = ["--tie-embeddings"] if shape.vocab_size > 65 else []
    return attnlm("train", str(dataset.path), *given, *tied, "--json")


def _speed(command: list[str]) -> float:
    speed: float = json.loads(measured(command).stdout)["tokens_per_second"]
    return speed


def _operations_per_token(model: str, shape: Shape) -> float:
    """Return the floating-point operations of a token, forward and backward, as nanoGPT counts."""
    a = resolve(_settings(model, shape)).spec
    products = a.costs(shape.vocab_size).multiplied_weights
    return 6.0 * (products + shape.layers * shape.context * shape.width)


def _settings(model: str, shape: Shape) -> dict[str, Any]:
    """Return the settings of a training of this shape."""
    settings: dict[str, Any] = {
        "model": model,
        **({} if model == "multi-head" else {"layers": shape.layers}),
        "embed_dim": shape.width,
        "heads": shape.heads,
        "block_size": shape.context,
        "batch_size": shape.batch,
        "optimizer": "adamw",
        "gradient_clip": 1.0,
        "steps": 2**30,
        "seed": 1,
    }
    if shape.vocab_size > 65 and model != "multi-head":
        settings["tie_embeddings"] = True
    return settings


class Ours:
    """A training of ours that goes on from call to call, by AdamW at its default rate."""

    def __init__(self, model: str, shape: Shape, dataset: Dataset, **settings: Any) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        device = choose_device("cpu")
        config = resolve({**_settings(model, shape), **settings})
        config = autotune(config, device, dataset)
        state = initial_state(config, shape.vocab_size, device)
        self.stepper = Stepper(state, config, dataset)
        self._tokens = shape.tokens

    def tokens_per_second(self, seconds: float = SECONDS) -> float:
        return self._tokens * steps_per_second(lambda _: self.stepper.step(), seconds)


def vocabulary(dataset: Dataset, text: Path) -> list[Row]:
    """Measure multi-head with GPT-2's vocabulary in training and evaluation, with full logits."""
    ids, windows, length = 50257, 32, 64
    rows = []
    whole = Ours("multi-head", Shape(1, 64, 4, length, windows, ids), dataset, threads=1)
    model, optimizer = whole.stepper.state.model, whole.stepper.state.optimizer
    tokens = torch.randint(ids, (windows, length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def all_logits(train: bool) -> float:
        torch.set_num_threads(os.cpu_count() or 1)
        began = time.perf_counter()
        with torch.set_grad_enabled(train):
            loss = cross_entropy(model(inputs), targets)
        if train:
            loss.backward()
            optimizer.update(1)
        return windows * length / (time.perf_counter() - began)

    threads = os.cpu_count() or 1
    shape = Shape(1, 64, 4, length, windows, ids)
    ours = Ours("multi-head", shape, dataset, threads=threads, compile="parts")
    val = dataset.val[: 4 * windows * length + 1]

    def evaluated() -> float:
        began = time.perf_counter()
        state = ours.stepper.state
        validation_loss(
            *(state.model, val, state.device),
            bytes_per_token=1.0,
            kernels=configured_kernels(ours.stepper.training),
            threads=threads,
        )
        return 4 * windows * length / (time.perf_counter() - began)

    for what, own, other in (
        ("training", ours.tokens_per_second, lambda: all_logits(True)),
        ("evaluation", evaluated, lambda: all_logits(False)),
    ):
        own_speed, other_speed, ratio = in_turn(own, other, ROUNDS)
        rows.append(
            Row(
                f"multi-head, {ids:,} ids, {what}: tokens/s",
                f"{own_speed:,.0f}",
                f"all logits at once {other_speed:,.0f}",
                f"{ratio:.2f}",
            )
        )
    return rows
