from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnlm.config import Setting, resolve
from attnlm.model import build_model
from attnlm.optimizer import Muon, build_optimizers, learning_rate_factor, orthogonalize


def factors(**settings: Setting) -> list[float]:
    training = resolve(settings).training
    assert training.steps is not None
    return [learning_rate_factor(step, training) for step in range(training.steps)]


def test_schedules_step_by_step() -> None:
    assert factors(schedule="constant", steps=3, warmup=0) == [1, 1, 1]
    assert factors(schedule="linear", steps=4, warmup=0) == [1, 0.75, 0.5, 0.25]
    assert factors(schedule="constant", steps=4, warmup=3) == [0.25, 0.5, 0.75, 1]
    cosine = factors(schedule="cosine", steps=4, warmup=0)
    assert cosine == pytest.approx([(1 + math.cos(math.pi * t)) / 2 for t in (0, 0.25, 0.5, 0.75)])
    flat_first = factors(schedule="linear", steps=10, warmup=0, cooldown=0.4)
    assert flat_first == pytest.approx([1] * 7 + [0.75, 0.5, 0.25])
    with_warmup = factors(schedule="linear", steps=6, warmup=2)
    assert with_warmup == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])


def test_orthogonalize_sets_all_singular_values_to_about_one() -> None:
    torch.manual_seed(0)
    for rows, columns in ((8, 8), (5, 13), (13, 5)):
        stack = torch.randn(3, rows, columns) * torch.tensor([0.01, 1.0, 100.0])[:, None, None]
        before = torch.linalg.svd(stack, full_matrices=False)
        after = orthogonalize(stack)
        values = torch.linalg.svdvals(after)
        assert values.min() > 0.3 and values.max() < 1.3
        # The singular vectors stay: U S V becomes about U V.
        exact = before.U @ before.Vh
        cosine = (after * exact).sum((-2, -1)) / (
            after.norm(dim=(-2, -1)) * min(rows, columns) ** 0.5
        )
        assert cosine.min() > 0.93


def test_muon_makes_the_update_of_the_paper() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(2, 6, 4))
    start = parameter.detach().clone()
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.5)
    momentum = torch.zeros(2, 6, 4)
    expected = start.clone()
    for seed in range(3):
        gradient = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(seed))
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = 0.05 * gradient + 0.95 * momentum
        update = torch.stack([orthogonalize(matrix[None])[0] for matrix in direction])
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * update
    torch.testing.assert_close(parameter.detach(), expected)


def decays(**settings: Setting) -> dict[str, float]:
    config = resolve({"steps": 1, **settings})
    model = build_model(config.model, 7)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{type(optimizer).__name__} {names[id(parameter)]}": group["weight_decay"]
        for optimizer in build_optimizers(model, config.training)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_weight_decay_falls_on_matrices_unless_told_otherwise() -> None:
    assert decays(model="single-head", weight_decay=0.5) == {
        "AdamW token_embedding.weight": 0.5,
        "AdamW position_embedding.weight": 0.5,
        "AdamW body.qkv": 0.5,
        "AdamW head.weight": 0.5,
        "AdamW head.bias": 0.0,
    }
    everywhere = decays(model="single-head", weight_decay=0.5, weight_decay_on="all")
    assert set(everywhere.values()) == {0.5}


def test_muon_takes_the_matrices_inside_and_adamw_the_rest() -> None:
    taken = decays(model="transformer", layers=1, embed_dim=8, heads=2, optimizer="muon")
    assert sorted(name.split(" ")[1] for name in taken if name.startswith("Muon")) == [
        "blocks.0.attention.projection.weight",
        "blocks.0.attention.qkv",
        "blocks.0.mlp.down.weight",
        "blocks.0.mlp.gate_up",
    ]
    assert len(taken) == len(
        list(build_model(resolve({"model": "transformer", "layers": 1}).model, 7).parameters())
    )
