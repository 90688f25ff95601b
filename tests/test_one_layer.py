"""The gradient that is written out equals autograd's, through PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm import evaluation, kernels, memory
from attnlm.attention import SelfAttention
from attnlm.config import resolve
from attnlm.device import Device
from attnlm.evaluation import validation_loss
from attnlm.model import AttentionModel, build_model, cross_entropy
from attnlm.native import COMPILATION
from attnlm.one_layer import (
    CompiledOneLayer,
    OneLayer,
    compiled_parts,
    has_parts,
    saved_by_compiling,
    written_out,
)

V, B, T = 11, 4, 5
CPU = Device("cpu", "float32", "")


def a_model(**settings: Any) -> AttentionModel:
    torch.manual_seed(0)
    model = build_model(resolve({"block_size": T, "steps": 1, **settings}).model, V).double()
    assert isinstance(model, AttentionModel)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    return model


SETTINGS: list[dict[str, Any]] = [
    {"model": "single-head", "embed_dim": 7},
    {"model": "single-head", "embed_dim": 7, "head_size": 3},
    {"model": "multi-head", "embed_dim": 12, "heads": 3},
    {"model": "multi-head", "embed_dim": 6, "heads": 3, "head_size": 5, "projection": True},
    {"model": "multi-head", "embed_dim": 6, "heads": 3, "qkv_bias": True},
    {"model": "wide-head", "embed_dim": 6, "heads": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradients_are_autograds(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(**settings)
    assert written_out(model, B, CPU, "off") is not None
    form = OneLayer(model, B)
    for _ in range(2):  # the second time its memory is full of the first
        inputs, targets = torch.randint(V, (2, B, T))
        loss = form(inputs, targets)
        found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "suits", lambda x: False)
            expected = cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "settings",
    [
        *SETTINGS,
        {"model": "multi-head", "embed_dim": 16, "heads": 2, "block_size": 16},
        {"model": "multi-head", "embed_dim": 32, "heads": 2, "block_size": 37},
        {"model": "single-head", "embed_dim": 16, "block_size": 70},
    ],
    ids=str,
)
def test_compiled_loss_and_gradients_are_the_plain_ones(settings: dict[str, Any]) -> None:
    model = a_model(**settings).float()
    if (compiled := compiled_parts(model.config)) is None:
        pytest.skip("there is no C compiler")
    for parameter in model.parameters():
        parameter.data /= 2  # so that scores are not so large that float32 is all that is compared
        parameter.grad = torch.zeros_like(parameter)
    forms = CompiledOneLayer(model, B, compiled), OneLayer(model, B)
    for _ in range(2):
        inputs, targets = torch.randint(V, (2, B, model.config.block_size))
        losses, gradients = [], []
        for form in forms:
            losses.append(form(inputs, targets))
            gradients.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
        for one, other in zip(*gradients, strict=True):
            scale = float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)


def test_parts_are_compiled_where_that_saves_time() -> None:
    def saved(**settings: Any) -> float:
        config = resolve({"model": "multi-head", **settings})
        return saved_by_compiling(config) if has_parts(config, V) else 0.0

    assert saved(steps=10_000) > COMPILATION > saved(steps=100)
    assert saved(budget=60.0) > COMPILATION > saved(budget=1.0)
    assert saved(steps=10_000, heads=1, embed_dim=64) == 0  # too large a head
    assert saved(steps=10_000, dropout=0.1) == 0
    assert saved(steps=10_000, model="transformer") == 0


def test_larger_heads_than_a_row_has_room_for_are_not_compiled() -> None:
    """A run's configuration may ask for what no training would: C would write past its arrays."""
    if compiled_parts(resolve({"model": "single-head", "embed_dim": 32}).model) is None:
        pytest.skip("there is no C compiler")
    model = build_model(
        resolve({"model": "single-head", "embed_dim": 33, "block_size": T, "steps": 1}).model, V
    )
    assert isinstance(model, AttentionModel)
    assert compiled_parts(model.config) is None
    assert type(written_out(model, B, CPU, "parts")) is OneLayer


def test_a_loss_of_hopeless_logits_is_finite() -> None:
    model = a_model(model="single-head", embed_dim=7)
    inputs, targets = torch.randint(V, (2, B, T))
    with torch.no_grad():
        model.head.bias[:] = torch.linspace(-3000, 3000, V)
    loss = OneLayer(model, B)(inputs, targets)
    logits: Tensor = model(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "average", "embed_dim": 6},
        {"model": "single-head", "embed_dim": 6, "dropout": 0.1},
        {"model": "single-head", "embed_dim": 6, "block_size": 300},
        {"model": "transformer", "embed_dim": 8, "heads": 2, "layers": 1},
        {"model": "bigram"},
    ],
    ids=str,
)
def test_other_models_are_left_to_autograd(settings: dict[str, Any]) -> None:
    model = build_model(resolve({"block_size": T, "steps": 1, **settings}).model, V)
    assert written_out(model, B, CPU, "off") is None


def test_a_vocabulary_larger_than_the_batch_is_left_to_autograd() -> None:
    model = a_model(model="multi-head", embed_dim=12, heads=3)
    assert isinstance(model.body, SelfAttention)
    assert written_out(model, 3, CPU, "off") is not None
    assert written_out(model, 2, CPU, "off") is None


@pytest.mark.parametrize("compile", ["off", "parts"])
def test_the_loss_alone_is_that_of_the_gradient(compile: str) -> None:
    model = a_model(model="multi-head", embed_dim=6, heads=3, projection=True).float()
    form = written_out(model, B, CPU, compile)
    assert form is not None
    for _ in range(2):
        inputs, targets = torch.randint(V, (2, B, T))
        alone = form.loss(inputs, targets)
        assert alone == form(inputs, targets)
        torch.testing.assert_close(alone, cross_entropy(model(inputs), targets).detach())


@pytest.mark.parametrize("compile", ["off", "parts"])
def test_validation_loss_is_the_same_in_this_form(
    compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over whole batches, windows that fill none, and a last window that is shorter."""
    model = a_model(model="multi-head", embed_dim=6, heads=3, qkv_bias=True).float()
    monkeypatch.setitem(memory._TOKENS_AT_ONCE, "cpu", 4 * T)
    tokens = torch.randint(V, (4 * T * 3 + 2 * T + 3,)).numpy().astype(np.uint16)
    loss = validation_loss(model, tokens, CPU, bytes_per_token=1, compile=compile).loss
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "written_out", lambda *_: None)
        plain = validation_loss(model, tokens, CPU, bytes_per_token=1).loss
    assert loss == pytest.approx(plain, rel=1e-6)
    summed = 0.0
    for first in range(0, len(tokens) - 1, T):
        window = torch.from_numpy(tokens[first : first + T + 1].astype(np.int64))[None]
        mean = cross_entropy(model(window[:, :-1]), window[:, 1:]).item()
        summed += mean * (window.numel() - 1)
    assert loss == pytest.approx(summed / (len(tokens) - 1), rel=1e-6)
