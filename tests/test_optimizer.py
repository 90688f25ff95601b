from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnlm.base.settings import Setting
from attnlm.config.settings import Config, resolve
from attnlm.model.language_model import build_model
from attnlm.training.optimizer import Optimizer, orthogonalize
from attnlm.training.schedule import learning_rate_factor


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


def a_model_with_gradients(seed: int, **settings: Setting) -> tuple[nn.Module, Config]:
    config = resolve({"steps": 10, "embed_dim": 12, "block_size": 5, **settings})
    torch.manual_seed(seed)
    model = build_model(config.model, 7)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, config


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize("decay_on", ["matrices", "all"])
@pytest.mark.parametrize("clip", [None, 1.5, 1e9])
def test_adamw_is_pytorchs(decay_on: str, clip: float | None) -> None:
    settings: dict[str, Setting] = {
        "optimizer": "adamw",
        "weight_decay": 0.3,
        "weight_decay_on": decay_on,
        "beta2": 0.9,
    }
    if clip is not None:
        settings["gradient_clip"] = clip
    ours, config = a_model_with_gradients(1, **settings)
    theirs, _ = a_model_with_gradients(1, **settings)
    flat_decay = 0.3 if decay_on == "all" else 0.0
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.ndim <= 1], "weight_decay": flat_decay},
        ],
        lr=config.training.learning_rate,
        betas=(0.9, 0.9),
    )
    optimizer = Optimizer(ours, config.training)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(step)
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        factor = learning_rate_factor(step, config.training)
        for group in reference.param_groups:
            group["lr"] = config.training.learning_rate * factor
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)
        assert one.grad is not None and not one.grad.any(), "gradients are set to 0"


def test_muon_makes_the_update_of_the_paper() -> None:
    settings: dict[str, Setting] = {
        "model": "transformer", "layers": 2, "heads": 2, "optimizer": "muon",
        "weight_decay": 0.5, "schedule": "constant", "learning_rate": 0.1, "beta1": 0.95,
    }  # fmt: skip
    model, config = a_model_with_gradients(1, **settings)
    reference, _ = a_model_with_gradients(1, **settings)
    optimizer = Optimizer(model, config.training)
    name = "blocks.1.mlp.gate_up"
    expected = reference.get_parameter(name).detach().clone()
    momentum = torch.zeros_like(expected)
    for step in range(3):
        give_gradients(model, step)
        give_gradients(reference, step)
        optimizer.step(step)
        gradient = reference.get_parameter(name).grad
        assert gradient is not None
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = 0.05 * gradient + 0.95 * momentum
        update = torch.stack([orthogonalize(matrix[None])[0] for matrix in direction])
        scale = 0.2 * math.sqrt(max(expected.shape[-2:]))
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * scale * update
    torch.testing.assert_close(model.get_parameter(name).detach(), expected)


def test_muon_takes_the_matrices_inside_and_adamw_the_rest() -> None:
    model, config = a_model_with_gradients(
        1, model="transformer", layers=1, heads=2, optimizer="muon"
    )
    state = Optimizer(model, config.training).state()
    by_adamw = {name.removesuffix("/square") for name in state if name.endswith("/square")}
    everything = {name for name, _ in model.named_parameters()}
    assert {name.removesuffix("/mean") for name in state if name.endswith("/mean")} == everything
    assert everything - by_adamw == {
        "blocks.0.attention.projection.weight",
        "blocks.0.attention.qkv",
        "blocks.0.mlp.down.weight",
        "blocks.0.mlp.gate_up",
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_goes_on_from_its_state(optimizer: str) -> None:
    settings: dict[str, Setting] = {"model": "transformer", "layers": 2, "optimizer": optimizer}
    model, config = a_model_with_gradients(1, heads=2, **settings)
    first = Optimizer(model, config.training)
    for step in range(3):
        give_gradients(model, step)
        first.step(step)
    copy, _ = a_model_with_gradients(2, heads=2, **settings)
    copy.load_state_dict(model.state_dict())
    second = Optimizer(copy, config.training)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    for trained, with_optimizer in ((model, first), (copy, second)):
        give_gradients(trained, 3)
        with_optimizer.step(3)
    for one, other in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(one, other)
