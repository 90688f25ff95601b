"""`python -m benchmarks.nanogpt CHECKOUT LAYERS WIDTH …`: nanoGPT's training loop, timed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    """Shape of a training step: layers × width, context, batch size, vocabulary."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocab_size: int = 65

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    def __str__(self) -> str:
        ids = f", {self.vocab_size:,} ids" if self.vocab_size > 65 else ""
        return f"{self.layers} × {self.width}, context {self.context:,}, batch {self.batch}{ids}"


def model_of(checkout: Path, shape: Shape, *, bias: bool = True) -> Any:
    """Return nanoGPT's model of a shape. What it prints goes to stderr."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
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
        bias=bias,
    )
    with contextlib.redirect_stdout(sys.stderr):
        return module.GPT(config)


class Rival:
    """nanoGPT's model, optimizer and loop, in float32 and without torch.compile."""

    def __init__(self, checkout: Path, shape: Shape) -> None:
        self._model = model_of(checkout, shape)
        with contextlib.redirect_stdout(sys.stderr):  # it prints its sizes
            self._optimizer = self._model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
        ids = torch.randint(min(65, shape.vocab_size), (8, shape.batch, shape.context + 1))
        self._batches = [(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
        self._tokens = shape.tokens

    def tokens_per_second(self, seconds: float) -> float:
        """Return the speed of steps that are made for this long."""
        torch.set_num_threads(os.cpu_count() or 1)
        return self._tokens * steps_per_second(self._step, seconds)

    def _step(self, number: int) -> None:
        _, loss = self._model(*self._batches[number % len(self._batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def steps_per_second(step: Callable[[int], object], seconds: float) -> float:
    """Return the speed of calls with 0, 1, …, made for this long and at least twice.

    One call more is made first and does not count.
    """
    step(0)
    began, made = time.perf_counter(), 0
    while made < 2 or time.perf_counter() - began < seconds:
        step(made)
        made += 1
    return made / (time.perf_counter() - began)


if __name__ == "__main__":
    checkout, *sizes, seconds = sys.argv[1:]
    print(Rival(Path(checkout), Shape(*map(int, sizes))).tokens_per_second(float(seconds)))
