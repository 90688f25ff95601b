"""The updates of weights and running means by AdamW and Muon.

torch.optim is not used, since importing it takes longer than a small run: the import loads
PyTorch's compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlm.config.training import TrainingConfig
from attnlm.model.ops.linear import product


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), for tensors of any shapes."""

    def __init__(
        self, tensors: Sequence[tuple[Tensor, ...]], weight_decay: float, config: TrainingConfig
    ) -> None:
        """Take a tuple for each parameter: its values, gradient, mean and mean square."""
        self._columns = [list(column) for column in zip(*tensors, strict=True)]
        self._options: dict[str, Any] = {"weight_decay": weight_decay, "eps": 1e-8}
        self._options |= {"beta1": config.beta1, "beta2": config.beta2}
        self._options |= {"amsgrad": False, "maximize": False}
        self.work = 100.0 * sum(v.numel() for v in self._columns[0])  # bound by memory
        self._made = [torch.zeros((), device=tensors[0][0].device)] * len(tensors)

    def update(self, rate: float, step: int) -> None:
        """Make the next update, after `step` earlier ones."""
        self._made[0].fill_(step + 1)
        # torch.optim.AdamW(fused=True) calls this: one pass over memory.
        update: Any = torch._fused_adamw_  # its types do not allow a dictionary of options
        update(*self._columns, [], self._made, lr=rate, **self._options)


class Muon:
    """Momentum, orthogonalized before each update of a matrix (Jordan et al., 2024).

    Updates N matrices of the same `shape`, (R, C). If the model is sharded, this process updates
    its rows of each matrix, and `orthogonalized` gathers the matrices and orthogonalizes them.
    Gradient and mean are stacked, (N, rows, C). Updates are multiplied by 0.2 √max(R, C), which
    makes them as large as AdamW's, so that both rules can use the same learning rate and weight
    decay (Liu et al., 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        gradient: Tensor,
        mean: Tensor,
        weight_decay: float,
        config: TrainingConfig,
        shape: tuple[int, ...],
        orthogonalized: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        self._values, self._gradient, self._mean = list(values), gradient, mean
        self._weight_decay, self._momentum = weight_decay, config.beta1
        self._scale = 0.2 * math.sqrt(max(shape))
        self.work = 30.0 * gradient.numel() * min(shape)
        self._orthogonalized = orthogonalized or orthogonalize
        # On most CPUs matmuls in bfloat16 are slow.
        half = config.dtype == "bfloat16" and gradient.is_cuda
        self._dtype = torch.bfloat16 if half else gradient.dtype

    def update(self, rate: float, step: int) -> None:
        """Make the next update, after `step` earlier ones."""
        self._mean.lerp_(self._gradient, 1 - self._momentum)
        # Nesterov: one step further along the momentum.
        direction = self._gradient.lerp(self._mean, self._momentum)
        changes = self._orthogonalized(direction, self._dtype).unbind()
        if self._weight_decay:
            torch._foreach_mul_(self._values, 1 - rate * self._weight_decay)
        torch._foreach_add_(self._values, changes, alpha=-rate * self._scale)


def orthogonalize(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return N matrices, (N, R, C), with singular values set to about 1.

    Computes Newton-Schulz iterations in `dtype`. With Jordan's coefficients, a few are enough, but
    the result is not exact: its singular values are between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices_NRC.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = _products(x, x)
        polynomial = _products(gram, gram).mul_(c).add_(gram, alpha=b)  # symmetric
        x = _products(polynomial, x.mT).add_(x, alpha=a)
    return (x.mT if tall else x).to(matrices_NRC.dtype)


def _products(x_NRC: Tensor, y_NSC: Tensor) -> Tensor:
    """Return x yᵀ for each pair of matrices, (N, R, S)."""
    if x_NRC.is_cuda:
        return torch.bmm(x_NRC, y_NSC.mT)
    return torch.stack([product(x, y) for x, y in zip(x_NRC, y_NSC, strict=True)])
