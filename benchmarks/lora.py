"""LoRA on a model of GPT-2's shape (124M parameters), compared with `transformers` and `peft`.

Weights are random, which does not affect the time. Both train rank 8 on the query, key and value
projections, on the same batches, in float32, with AdamW and clipping, without dropout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from attnlm.data.dataset import Dataset
from benchmarks.nanogpt import Shape, steps_per_second
from benchmarks.table import Row, in_turn, measured
from benchmarks.transformer import ROUNDS, SECONDS, Ours

SHAPES = (
    Shape(12, 768, 12, 256, 4, 50257),
    Shape(12, 768, 12, 1024, 4, 50257),
)
_RANK = 8


def lora(dataset: Dataset, text: Path) -> list[Row]:
    """Tokens a second, and the most memory that each takes by itself."""
    rows = []
    for shape in SHAPES:
        rival = _Rival(shape)
        ours = Ours("gpt2", shape, dataset, lora=_RANK, gradient_clip=1.0)
        own, other, ratio = in_turn(ours.tokens_per_second, rival.tokens_per_second, ROUNDS)
        name = f"LoRA, {shape}"
        rows.append(Row(f"{name}: tokens/s", f"{own:,.0f}", f"peft {other:,.0f}", f"{ratio:.2f}"))
        del ours, rival
        most = [_memory(shape, which) for which in ("ours", "rival")]
        in_words = [f"{mib:,.0f} MiB" for mib in most]
        rows.append(
            Row(f"{name}: memory", in_words[0], f"peft {in_words[1]}", f"{most[1] / most[0]:.2f}")
        )
    return rows


class _Rival:
    """A stock GPT-2 with an adapter of `peft`, in the usual loop."""

    def __init__(self, shape: Shape) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        adapter: Any = LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        )
        self._model: Any = get_peft_model(GPT2LMHeadModel(config), adapter)
        self._model.train()
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, 1e-3)
        self._batches = torch.randint(65, (8, shape.batch, shape.context))
        self._tokens = shape.batch * shape.context

    def tokens_per_second(self, seconds: float = SECONDS) -> float:
        torch.set_num_threads(os.cpu_count() or 1)
        return self._tokens * steps_per_second(self._step, seconds)

    def _step(self, number: int) -> None:
        ids = self._batches[number % len(self._batches)]
        self._model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _memory(shape: Shape, which: str) -> float:
    """MiB of a process of its own at its peak, libraries and all."""
    return measured([sys.executable, "-m", "benchmarks.lora", which, json.dumps(shape)]).mib


def main() -> None:
    """`python -m benchmarks.lora ours|rival SHAPE`: three steps."""
    import numpy as np

    which, shape = sys.argv[1], Shape(*json.loads(sys.argv[2]))
    if which == "ours":
        ids = np.random.default_rng(0).integers(65, size=8 * shape.context + 1).astype(np.uint16)
        data: Any = type("Data", (), {"train": ids, "vocab_size": shape.vocab_size})()
        Ours("gpt2", shape, data, lora=_RANK).tokens_per_second(0)
    else:
        _Rival(shape).tokens_per_second(0)


if __name__ == "__main__":
    main()
