"""Several linear maps of one input as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def joined_linear(x: Tensor, maps: Sequence[nn.Linear], *, joins_weights: bool = True) -> Tensor:
    """The outputs of `maps` side by side: (..., C) → (..., N), N the sum of their widths.

    To join the weights is faster; autograd then keeps a copy of them.
    """
    if not joins_weights:
        return torch.cat([m(x) for m in maps], dim=-1)
    biases: list[Tensor] = [m.bias for m in maps if m.bias is not None]
    weights: list[Tensor] = [m.weight for m in maps]
    return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
