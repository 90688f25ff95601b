"""The norms that stand before the parts of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm.model.architecture import Architecture
from attnlm.model.ops.norms import rms_norm


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · gain (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return rms_norm(x, self.gain, self.epsilon)


class LayerNorm(nn.Module):
    """(x − mean) / √(variance + ε) · gain + bias (Ba et al., 2016)."""

    def __init__(self, size: int, epsilon: float, *, bias: bool) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return F.layer_norm(x, self.gain.shape, self.gain, self.bias, self.epsilon)


def norm_of(a: Architecture, size: int) -> nn.Module | None:
    """The norm that an architecture names, over `size` features; None where it has none."""
    if a.norm == "rms":
        return RMSNorm(size, a.norm_epsilon)
    if a.norm == "layer":
        return LayerNorm(size, a.norm_epsilon, bias=a.bias)
    return None
