"""`python -m benchmarks.nanogpt train|sample LAYERS WIDTH HEADS CONTEXT BATCH VOCAB …`: nanoGPT.

Times steps or sampling of the model of the checkout that NANOGPT names, and prints tokens per
second as JSON. On a CPU it computes eagerly in float32; on a GPU in bfloat16, and steps are those
of torch.compile, as nanoGPT's scripts do by default.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import python


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

    @property
    def flops_per_token(self) -> float:
        """Operations of a token, forward and backward, of GPT-2's parts."""
        weights = 12 * self.layers * self.width**2 + self.vocab_size * self.width
        return 6.0 * (weights + self.layers * self.context * self.width)

    def __str__(self) -> str:
        ids = f", {self.vocab_size:,} ids" if self.vocab_size > 65 else ""
        return f"{self.layers} × {self.width}, context {self.context:,}, batch {self.batch}{ids}"


def command(checkout: Path | None, task: str, shape: Shape, **options: object) -> list[str] | str:
    """Return the command of this program, or the reason why it cannot run."""
    if checkout is None:
        return "NANOGPT is not set"
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return python("benchmarks.nanogpt", task, *shape, *given)


def _model(shape: Shape, device: str, *, bias: bool) -> Any:
    """Return nanoGPT's model of a shape. What it prints goes to stderr."""
    path = Path(os.environ["NANOGPT"]) / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
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
        return module.GPT(config).to(device)


def training_speed(shape: Shape, device: str, seconds: float) -> float:
    """Return tokens per second of training steps with its optimizer and clipping."""
    model = _model(shape, device, bias=True)  # our `gpt2` has biases
    with contextlib.redirect_stdout(sys.stderr):
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device)
    compiled = torch.compile(model) if device == "cuda" else model
    ids = torch.randint(min(65, shape.vocab_size), (8, shape.batch, shape.context + 1))
    batches = [(i[:, :-1].contiguous().to(device), i[:, 1:].contiguous().to(device)) for i in ids]

    def step(number: int) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            _, loss = compiled(*batches[number % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return shape.tokens * calls_per_second(step, seconds)


def sampling_speed(shape: Shape, device: str, tokens: int, prompt: int) -> float:
    """Return tokens per second of `batch` texts, each continued after `prompt` tokens."""
    model = _model(shape, device, bias=False).eval()
    ids = torch.randint(shape.vocab_size, (shape.batch, prompt), device=device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        model.generate(ids, 3)
        began = time.perf_counter()
        model.generate(ids, tokens).tolist()
    return shape.batch * tokens / (time.perf_counter() - began)


def calls_per_second(call: Callable[[int], object], seconds: float) -> float:
    """Return the speed of calls with 0, 1, …, made for this long and at least twice.

    Two calls more are made first and do not count.
    """
    call(0)
    call(1)
    began, made = time.perf_counter(), 0
    while made < 2 or time.perf_counter() - began < seconds:
        call(made)
        made += 1
    return made / (time.perf_counter() - began)


def main() -> None:
    """Print the tokens per second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["train", "sample"])
    parser.add_argument("sizes", type=int, nargs=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=1)
    given = parser.parse_args()
    shape = Shape(*given.sizes)
    torch.set_num_threads(os.cpu_count() or 1)
    if given.task == "train":
        speed = training_speed(shape, given.device, given.seconds)
    else:
        speed = sampling_speed(shape, given.device, given.tokens, given.prompt)
    print(json.dumps({"tokens_per_second": speed}))


if __name__ == "__main__":
    main()
