"""Matrix products by either of the two libraries that PyTorch has on a CPU.

PyTorch's default is a BLAS: MKL on x86, which leaves AVX-512 unused on processors that are not
Intel's. oneDNN uses it, and can be slower elsewhere: `using` says which one to take. oneDNN's
linear map has no derivative: callers compute gradients by more products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.model.ops import kernels_in_use

FEWEST_BY_ONEDNN = 2**20
"""Multiplications: with fewer, a call to oneDNN, a dozen microseconds, costs more than it saves."""


def product(x_MC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, (M, N), outside of autograd."""
    is_large = x_MC.numel() * len(weight_NC) >= FEWEST_BY_ONEDNN
    if is_large and kernels_in_use().matmul == "onednn" and x_MC.is_cpu:
        linear = onednn_linear()
        if linear is not None and x_MC.dtype == torch.float32:
            out: Tensor = linear(x_MC, weight_NC, bias_N, "none", [], "")
            return out
    return F.linear(x_MC, weight_NC, bias_N)


@functools.cache
def onednn_linear() -> Callable[..., Any] | None:
    """Return oneDNN's linear map, or None if PyTorch lacks it or it gives wrong numbers."""
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None:
        return None
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        is_right = torch.equal(linear(x, weight, None, "none", [], ""), F.linear(x, weight))
    except RuntimeError:
        return None
    return linear if is_right else None
