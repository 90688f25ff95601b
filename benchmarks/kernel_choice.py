"""The loss of speed by rules for kernels and threads, compared with the fastest values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.settings import Config, resolve
from attnlm.data.dataset import Dataset
from attnlm.workflows.autotune import autotune, make_trial_stepper
from benchmarks.table import Row

_SETTINGS = ("threads", "matmul", "attention_kernel")
_ROUNDS, _SECONDS = 4, 0.15
_SMALL: dict[str, Any] = {"heads": 4, "block_size": 64, "batch_size": 12, "optimizer": "adamw"}
_LONGER = {**_SMALL, "block_size": 256, "batch_size": 8}
_SHAPES: dict[str, dict[str, Any]] = {
    **{model: {"model": model} for model in ("bigram", "average", "single-head", "multi-head")},
    "r2-multi-head": {"model": "multi-head", "embed_dim": 32, "block_size": 32, "batch_size": 16},
    "wide-head": {"model": "wide-head"},
    "transformer": {"model": "transformer"},
    "gpt2, 2 × 64": {"model": "gpt2", "layers": 2, "embed_dim": 64, **_SMALL},
    "gpt2, 4 × 128": {"model": "gpt2", "layers": 4, "embed_dim": 128, **_SMALL},
    "transformer, 4 × 128": {"model": "transformer", "layers": 4, "embed_dim": 128, **_SMALL},
    "transformer, 4 × 192": {"model": "transformer", "layers": 4, "embed_dim": 192, **_LONGER},
    "transformer, 4 × 256": {"model": "transformer", "layers": 4, "embed_dim": 256, **_LONGER},
}


def choices(dataset: Dataset, text: Path) -> list[Row]:
    """Compare the kernels that the rules choose with the fastest choice, in alternating steps."""
    rows = []
    for name, settings in _SHAPES.items():
        with torch_settings_restored():  # steps change the number of threads
            rows.append(_row(name, settings, dataset, torch.get_num_threads()))
    return rows


def _row(name: str, settings: dict[str, Any], dataset: Dataset, all_threads: int) -> Row:
    device = choose_device("cpu")

    def settled(**values: Any) -> Config:
        torch.set_num_threads(all_threads)
        return autotune(resolve({**settings, "seed": 1, "steps": 9, **values}), device, dataset)

    ruled = _chosen(settled())
    steps: dict[tuple[Any, ...], Callable[[], object]] = {}
    matmuls = "blas", "onednn", "native"
    for values in itertools.product((1, all_threads), matmuls, ("torch", "native")):
        try:
            config = settled(**dict(zip(_SETTINGS, values, strict=True)))
        except AttnlmError:  # this model does not use the kernel
            continue
        steps[_chosen(config)] = make_trial_stepper(config, device, dataset).step
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for values, step in steps.items():
            step()
            began, made = time.perf_counter(), 0
            while made < 2 or time.perf_counter() - began < _SECONDS:
                step()
                made += 1
            best[values] = min(best[values], (time.perf_counter() - began) / made)
    fastest = min(best, key=lambda values: best[values])
    return Row(
        f"{name}: a step, by rules",
        f"{1e3 * best[ruled]:.2f} ms ({_words(ruled)})",
        f"{1e3 * best[fastest]:.2f} ms ({_words(fastest)})",
        f"{best[fastest] / best[ruled]:.2f}",
    )


def _chosen(config: Config) -> tuple[Any, ...]:
    return tuple(getattr(config.training, name) for name in _SETTINGS)


def _words(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))
