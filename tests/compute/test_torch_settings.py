"""What a notebook has set in PyTorch changes no result, and is there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch

import attnlm
from attnlm.compute.torch_settings import usual_torch_settings


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: _default_dtype(torch.float64),
    "bfloat16": lambda: _default_dtype(torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}


def test_threads_share_the_default_dtype() -> None:
    first, second = (ExitStack() for _ in range(2))
    with _default_dtype(torch.float64):
        first.enter_context(usual_torch_settings())
        second.enter_context(usual_torch_settings())
        first.close()
        assert torch.get_default_dtype() == torch.float32  # the second still computes
        second.close()
        assert torch.get_default_dtype() == torch.float64


def _results(dataset: attnlm.Dataset, model: str) -> tuple[Any, ...]:
    sizes: dict[str, Any] = {"block_size": 8, "batch_size": 4, "steps": 3, "seed": 1, "threads": 1}
    folder = dataset.path.parent.parent / "checkpoints"
    run = attnlm.train(dataset, model=model, checkpoint_dir=folder, **sizes)
    text = "".join(attnlm.sample(run, tokens=20, seed=1))
    weights = {name: p.tolist() for name, p in attnlm.load_model(run)[0].named_parameters()}
    return text, weights, attnlm.evaluate(run).loss


@pytest.fixture(scope="module")
def usual(dataset: attnlm.Dataset) -> dict[str, tuple[Any, ...]]:
    return {model: _results(dataset, model) for model in ("average", "transformer")}


@pytest.mark.parametrize(
    ("model", "name"), [*(("transformer", name) for name in SETTINGS), ("average", "float64")]
)
def test_settings_of_a_notebook_change_nothing(
    model: str, name: str, dataset: attnlm.Dataset, usual: dict[str, tuple[Any, ...]]
) -> None:
    with SETTINGS[name]():
        before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.ones(1).device
        assert _results(dataset, model) == usual[model]
        after = torch.get_default_dtype(), torch.is_grad_enabled(), torch.ones(1).device
        assert after == before
