"""Products with matrices, by the faster of the two libraries that PyTorch has on a CPU.

Its own products are MKL's, which leaves AVX-512 unused on processors that are not Intel's. oneDNN
does not. Its form for linear maps has no derivative: who calls it makes that of more products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FEWEST = 2**20
"""Multiplications: with fewer, oneDNN's dozen microseconds for a call cost more than it saves."""


def product(x_MC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, (M, N), outside of autograd."""
    is_small = x_MC.numel() * len(weight_NC) < _FEWEST
    if is_small or not x_MC.is_cpu or x_MC.dtype != torch.float32 or (linear := _onednn()) is None:
        return F.linear(x_MC, weight_NC, bias_N)
    out: Tensor = linear(x_MC, weight_NC, bias_N, "none", [], "")
    return out


@functools.cache
def _onednn() -> Callable[..., Any] | None:
    """Its linear map; None where PyTorch lacks it, or it does not compute what it should."""
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        is_right = torch.equal(linear(x, weight, None, "none", [], ""), F.linear(x, weight))
    except RuntimeError:
        return None
    return linear if is_right else None
