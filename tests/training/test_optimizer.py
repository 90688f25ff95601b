"""Schedules of the learning rate, and updates that equal those of PyTorch's optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from attnlm.base.setting_fields import Setting
from attnlm.compute.threads import new_pool
from attnlm.config.settings import Config, resolve
from attnlm.model.language_model import LanguageModel
from attnlm.training import optimizer as optimizers
from attnlm.training.optimizer import Optimizer, orthogonalize
from attnlm.training.schedule import learning_rate
from tests.models import parts_of
from tests.tolerances import assert_near


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant", "steps": 3}, [1, 1, 1]),
        ({"schedule": "linear", "steps": 4}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "constant", "steps": 4, "warmup": 3}, [0.25, 0.5, 0.75, 1]),
        (
            {"schedule": "cosine", "steps": 4},
            [(1 + math.cos(math.pi * t)) / 2 for t in (0, 0.25, 0.5, 0.75)],
        ),
        ({"schedule": "linear", "steps": 4, "min_learning_rate": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"schedule": "cosine", "steps": 4, "min_learning_rate": 1.0}, [1] * 4),
        ({"schedule": "linear", "steps": 10, "cooldown": 0.4}, [1] * 7 + [0.75, 0.5, 0.25]),
        (
            {"schedule": "linear", "steps": 6, "warmup": 2},
            [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25],
        ),
    ],
)
def test_schedules_step_by_step(settings: dict[str, Setting], expected: list[float]) -> None:
    training = resolve({"learning_rate": 1.0, "warmup": 0, **settings}).training
    steps = range(1, len(expected) + 1)
    assert [learning_rate(step, training) for step in steps] == pytest.approx(expected)


def test_orthogonalize_sets_all_singular_values_to_about_one() -> None:
    torch.manual_seed(0)
    for rows, columns in ((8, 8), (5, 13), (13, 5)):
        stack = torch.randn(3, rows, columns) * torch.tensor([0.01, 1.0, 100.0])[:, None, None]
        before = torch.linalg.svd(stack, full_matrices=False)
        after = orthogonalize(stack, torch.float32)
        values = torch.linalg.svdvals(after)
        assert values.min() > 0.3 and values.max() < 1.3
        # The singular vectors stay: U S V becomes about U V.
        exact = before.U @ before.Vh
        cosine = (after * exact).sum((-2, -1)) / (
            after.norm(dim=(-2, -1)) * min(rows, columns) ** 0.5
        )
        assert cosine.min() > 0.93


def a_model_with_gradients(seed: int, **settings: Setting) -> tuple[LanguageModel, Config]:
    config = resolve({"steps": 10, "embed_dim": 12, "block_size": 5, **settings})
    torch.manual_seed(seed)
    model = parts_of(config).build(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, config


def give_gradients(model: nn.Module, step: int) -> None:
    """Give each parameter a random gradient, always the same for a step, where its last one is."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.normal_(generator=generator)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("decay_on", "clip", "beta1"),
    [("matrices", None, 0.9), ("all", 1.5, 0.0), ("matrices", 1e9, 0.95)],
)
def test_updates_equal_pytorch(
    optimizer: str, decay_on: str, clip: float | None, beta1: float, monkeypatch: Any
) -> None:
    """AdamW's, and Muon's of the matrices inside the model with the scale that suits AdamW."""
    # PyTorch's Muon computes in bfloat16 everywhere, ours on a CPU in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # by which torch 2.15 does that
    settings: dict[str, Setting] = {"model": "transformer", "heads": 2, "kv_heads": 1, "bias": True}
    settings |= {"optimizer": optimizer, "beta1": beta1, "beta2": 0.9, "learning_rate": 0.1}
    settings |= {"weight_decay": 0.3, "weight_decay_on": decay_on}
    settings |= {} if clip is None else {"gradient_clip": clip}
    ours, config = a_model_with_gradients(1, **settings)
    theirs, _ = a_model_with_gradients(1, **settings)
    named = dict(theirs.named_parameters())
    inside = [p for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2]
    assert len(inside) == 14
    by_muon = inside if optimizer == "muon" else []
    by_adamw = [p for p in named.values() if all(p is not other for other in by_muon)]
    flat = {"params": [p for p in by_adamw if p.ndim == 1]}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in by_adamw if p.ndim == 2]},
        flat if decay_on == "all" else {**flat, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(beta1, 0.9), weight_decay=0.3)
    references: list[torch.optim.Optimizer] = [adamw]
    if by_muon:
        about: dict[str, Any] = {"momentum": beta1, "adjust_lr_fn": "match_rms_adamw"}
        references.append(torch.optim.Muon(by_muon, weight_decay=0.3, **about))
    updates = Optimizer(ours, config.training)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        updates.update(step, learning_rate(step + 1, config.training))
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        for reference in references:
            for group in reference.param_groups:
                group["lr"] = learning_rate(step + 1, config.training)
            reference.step()
    assert_near(dict(ours.named_parameters()), named)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_wait_for_no_device(optimizer: str) -> None:
    """PyTorch's meta device has no numbers that one could wait for."""
    model, config = a_model_with_gradients(
        1, model="transformer", heads=2, optimizer=optimizer, gradient_clip=1.0
    )
    updates = Optimizer(model.to("meta"), config.training)
    for step in range(2):
        updates.update(step, 0.1)
    assert all(p.is_meta for p in model.parameters()) and updates.norm() is not None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_threads_share_an_update_and_change_nothing(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "_MUON_AT_ONCE", 200)
    monkeypatch.setattr(optimizers, "_ADAMW_AT_ONCE", 50)
    settings: dict[str, Setting] = {"model": "transformer", "layers": 2, "optimizer": optimizer}
    results = []
    for threads in (1, 3):
        model, config = a_model_with_gradients(1, heads=2, **settings)
        updates = Optimizer(model, config.training)
        with new_pool(threads) as pool:
            for step in range(3):
                give_gradients(model, step)
                updates.update(step, 0.1, pool)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_reported_norm_is_the_gradients_before_clipping(clip: float | None) -> None:
    settings: dict[str, Setting] = {} if clip is None else {"gradient_clip": clip}
    model, config = a_model_with_gradients(1, model="multi-head", heads=2, **settings)
    updates = Optimizer(model, config.training)
    give_gradients(model, 0)
    expected = torch.linalg.vector_norm(updates.gradient).item()
    updates.update(0, 0.1)
    norm = updates.norm()
    assert norm is not None and norm.item() == pytest.approx(expected)
