"""AdamW, Muon, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnlm.config import TrainingConfig


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """The share of the highest learning rate that step 0 … steps − 1 is taken with.

    It rises in a line over `warmup` steps, stays, and falls towards 0 over the last `cooldown`
    fraction of the steps after the warm-up. One function of step and total: nothing to store.
    """
    assert config.steps is not None
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    falling = config.cooldown * (config.steps - config.warmup)
    left = (config.steps - step) / falling if config.schedule != "constant" else 1.0
    if left >= 1:
        return 1.0
    return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


def build_optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """The optimizers that together update every parameter of the model once per step.

    Muon takes the matrices inside the model; embeddings, head, norms and biases are AdamW's.
    Weight decay falls on matrices (embeddings and head among them) or, as the configuration says,
    on all parameters.
    """
    inside = _matrices_inside(model) if config.optimizer == "muon" else []
    taken = {id(parameter) for parameter in inside}
    rest = [p for p in model.parameters() if id(p) not in taken]
    decaying = [p for p in rest if p.ndim > 1 or config.weight_decay_on == "all"]
    steady = [p for p in rest if p.ndim <= 1 and config.weight_decay_on != "all"]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": steady, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=1e-8,
            fused=rest[0].device.type in ("cpu", "cuda"),
        )
    ]
    if inside:
        optimizers.append(Muon(inside, lr=config.learning_rate, weight_decay=config.weight_decay))
    return optimizers


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """The rate that the next update is made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def _matrices_inside(model: nn.Module) -> list[nn.Parameter]:
    outside = ("token_embedding", "position_embedding", "head", "table")
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and name.split(".")[0] not in outside
    ]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal before the update (Jordan et al., 2024).

    A parameter (..., rows, columns) counts as a stack of matrices. Updates are scaled by
    0.2 √max(rows, columns), which gives them the size of AdamW's, so that both take the same
    learning rate and weight decay (Liu et al., 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update. Matrices of the same shape are made orthogonal in one batch."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape[-2:], []).append(parameter)
            for shape, parameters in by_shape.items():
                self._update(parameters, shape, group)

    def _update(
        self, parameters: list[nn.Parameter], shape: torch.Size, group: dict[str, Any]
    ) -> None:
        directions = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum: Tensor = state["momentum"]
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            # Nesterov: one step further along the momentum.
            direction = parameter.grad.lerp(momentum, group["momentum"])
            directions.append(direction.reshape(-1, *shape))
        orthogonal = orthogonalize(torch.cat(directions))
        scale = -group["lr"] * 0.2 * math.sqrt(max(shape))
        counts = [direction.size(0) for direction in directions]
        for parameter, update in zip(parameters, orthogonal.split(counts), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.view_as(parameter), alpha=scale)


def orthogonalize(matrices_NRC: Tensor, steps: int = 5) -> Tensor:
    """Sets the singular values of N matrices to about 1 by Newton-Schulz iterations, (N, R, C).

    In float32 on a CPU, where bfloat16 products are slow, and in bfloat16 on a GPU. Coefficients
    are Jordan's: they trade exactness (values end between 0.7 and 1.2) for few steps.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrices_NRC.bfloat16() if matrices_NRC.is_cuda else matrices_NRC
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices_NRC.dtype)
