"""The transformer's step beside nanoGPT's: the same shape, batches, optimizer and clipping."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnlm.base.signals import Interruption
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.experiments.settle import settle
from attnlm.experiments.speed_check import peak_of_products
from attnlm.model.ops.loss import cross_entropy
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from attnlm.training.validation import validation_loss
from benchmarks.table import Row, in_turn


class Shape(NamedTuple):
    """What a step computes: layers × width, context, windows at once, vocabulary."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocab_size: int = 65

    def __str__(self) -> str:
        ids = f", {self.vocab_size:,} ids" if self.vocab_size > 65 else ""
        return f"{self.layers} × {self.width}, context {self.context:,}, batch {self.batch}{ids}"


SHAPES = (
    Shape(4, 128, 4, 64, 12),
    Shape(6, 384, 6, 256, 8),
    Shape(4, 256, 4, 2048, 1),
    Shape(4, 256, 4, 256, 4, 50257),
)
SECONDS = float(os.environ.get("SECONDS_A_ROUND", 4))
ROUNDS = int(os.environ.get("ROUNDS", 5))


def transformer(dataset: Dataset, text: Path) -> list[Row]:
    """Tokens a second of the gpt2 shape and of the default transformer, beside nanoGPT's loop."""
    folder = os.environ.get("NANOGPT")
    if folder is None:
        return [Row("transformer: step", "", "nanoGPT: NANOGPT is not set", "–")]
    peak = peak_of_products(os.cpu_count() or 1)
    rows = []
    for shape in SHAPES:
        rival = Rival(Path(folder), shape)
        for model in ("gpt2", "transformer"):
            ours = Ours(model, shape, dataset)
            own, other, ratio = in_turn(ours.tokens_per_second, rival.tokens_per_second, ROUNDS)
            share = own * ours.operations_per_token / peak
            rows.append(
                Row(
                    f"{model}, {shape}: tokens/s",
                    f"{own:,.0f} ({share:.0%} of peak)",
                    f"nanoGPT {other:,.0f}",
                    f"{ratio:.2f}",
                )
            )
    return rows


def steps_per_second(step: Callable[[int], object], seconds: float) -> float:
    """Of calls with 0, 1, …, for so long and twice at least, after one that does not count."""
    step(0)
    began, made = time.perf_counter(), 0
    while made < 2 or time.perf_counter() - began < seconds:
        step(made)
        made += 1
    return made / (time.perf_counter() - began)


class Ours:
    """Our training with AdamW, at its default learning rate; each call continues it."""

    def __init__(self, model: str, shape: Shape, dataset: Dataset, **settings: Any) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        given: dict[str, Any] = {
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
            given["tie_embeddings"] = True
        device = choose_device("cpu")
        config = settle(resolve({**given, **settings}), device, dataset)
        state = initial_state(config, shape.vocab_size, device)
        self.stepper = Stepper(state, config, dataset)
        self._tokens = shape.batch * shape.context
        products = sum(p.numel() for p in state.model.parameters() if p.ndim == 2)
        if not config.model.tie_embeddings:
            products -= shape.vocab_size * shape.width
        if config.model.positions == "learned":
            products -= shape.context * shape.width
        self.operations_per_token = 6.0 * (products + shape.layers * shape.context * shape.width)

    def tokens_per_second(self, seconds: float = SECONDS) -> float:
        interruption = Interruption()
        return self._tokens * steps_per_second(lambda _: self.stepper.step(interruption), seconds)


class Rival:
    """nanoGPT's model, optimizer and loop, in float32 and without torch.compile."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
        config = module.GPTConfig(
            n_layer=shape.layers,
            n_embd=shape.width,
            n_head=shape.heads,
            block_size=shape.context,
            vocab_size=shape.vocab_size,
            dropout=0.0,
            bias=True,
        )
        self._model = module.GPT(config)
        self._optimizer = self._model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
        ids = torch.randint(65, (8, shape.batch, shape.context + 1))
        self._batches = [(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
        self._tokens = shape.batch * shape.context

    def tokens_per_second(self, seconds: float = SECONDS) -> float:
        torch.set_num_threads(os.cpu_count() or 1)
        return self._tokens * steps_per_second(self._step, seconds)

    def _step(self, number: int) -> None:
        _, loss = self._model(*self._batches[number % len(self._batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def vocabulary(dataset: Dataset, text: Path) -> list[Row]:
    """multi-head with as many ids as GPT-2 has, in training and in evaluation, by whole logits."""
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
            optimizer.step(1)
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
            compile="parts",
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
