"""Tokens per second of attnlm, nanoGPT and the plain loop, all past their context.

nanoGPT is measured if the environment variable NANOGPT names a checkout. Runs alternate and the
best run of each side counts, since other load on the machine only slows them down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnlm.base.setting_fields import Setting
from attnlm.compute.device import Device
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.generation.decoders import fastest_decoding
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import LanguageModel
from benchmarks.nanogpt import Shape, model_of
from benchmarks.plain import PlainModel
from benchmarks.table import Row
from tests.models import parts_of

VOCAB_SIZE = 65
CPU = Device("cpu", "float32", "to be measured")

Timed = Callable[[], int]
"""Makes tokens, and says how many."""


_ROUNDS = int(os.environ.get("ROUNDS", 5))


def sample(dataset: Dataset, text: Path) -> list[Row]:
    """Models of random weights: what they say costs as much as what a trained one says."""
    rows = []
    if "NANOGPT" in os.environ:
        nanogpt = _nanogpt(Path(os.environ["NANOGPT"]))
        model = _model(model="transformer", layers=4, embed_dim=128, heads=4, block_size=64)
        for tokens, num_samples in ((500, 1), (10_000, 1), (1000, 64)):
            ours = _ours(model, tokens, num_samples)
            name = f"transformer, {num_samples} × {tokens:,}"
            rows.append(_compare(name, ours, "nanoGPT, one stream", nanogpt))
    for rung, heads in (("single-head", 1), ("multi-head", 4)):
        settings: dict[str, Setting] = {"heads": heads} if heads > 1 else {}
        model = _model(model=rung, embed_dim=32, block_size=32, **settings)
        for tokens in (2000, 150_000):
            name = f"{rung}, {tokens:,}"
            rows.append(_compare(name, _ours(model, tokens, 1), "plain loop", _plain(heads)))
    return rows


def _compare(name: str, ours: Timed, other: str, theirs: Timed) -> Row:
    best = {ours: 0.0, theirs: 0.0}
    for _ in range(_ROUNDS):
        for timed in best:
            best[timed] = max(best[timed], _rate(timed))
    speeds = f"{best[ours]:,.0f} tokens/s", f"{other} {best[theirs]:,.0f} tokens/s"
    return Row(f"sampling, {name} tokens", *speeds, f"{best[ours] / best[theirs]:.1f}")


def _rate(timed: Timed) -> float:
    began = time.perf_counter()
    return timed() / (time.perf_counter() - began)


def _model(**settings: Setting) -> LanguageModel:
    torch.manual_seed(1)
    model = parts_of(resolve(settings)).build(VOCAB_SIZE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def _ours(model: LanguageModel, tokens: int, num_samples: int) -> Timed:
    config = SamplingConfig(tokens=tokens, num_samples=num_samples)

    def timed() -> int:
        if num_samples > 1:
            fastest_decoding(model, CPU).generate_all([[0]], config, lambda sample, ids: False)
            return tokens * num_samples
        return sum(len(block_TB) for block_TB in fastest_decoding(model, CPU).generate([0], config))

    return timed


def _plain(heads: int) -> Timed:
    model = PlainModel(VOCAB_SIZE, embed_dim=32, heads=heads, block_size=32)
    return _timed_generate(model, 300)


def _nanogpt(checkout: Path) -> Timed:
    shape = Shape(layers=4, width=128, heads=4, context=64, batch=1, vocab_size=VOCAB_SIZE)
    return _timed_generate(model_of(checkout, shape, bias=False).eval(), 100)


def _timed_generate(model: Any, tokens: int) -> Timed:
    first = torch.zeros(1, 1, dtype=torch.long)
    full = model.generate(first, 64)  # from a full context on

    def timed() -> int:
        model.generate(full, tokens)
        return tokens

    return timed
