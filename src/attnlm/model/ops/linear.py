"""Linear maps, forward and backward.

PyTorch has two libraries for matmuls on a CPU: a BLAS, which is the default (MKL on x86), and
oneDNN. On x86 processors that are not Intel's, MKL does not use AVX-512, but oneDNN does. On all
other processors, oneDNN can be slower. `Kernels.matmul` names the library to use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import kernels_in_use, native_ops_for

FEWEST_BY_ONEDNN = 2**20
"""With fewer multiplications, a call to oneDNN (a dozen microseconds) costs more than it saves."""


def matmul(x_MC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, (M, N), by the library in use. The caller computes gradients itself."""
    is_large = x_MC.numel() * len(weight_NC) >= FEWEST_BY_ONEDNN
    if is_large and kernels_in_use().matmul == "onednn" and x_MC.is_cpu:
        linear = onednn_linear()
        if linear is not None and x_MC.dtype == torch.float32:
            out: Tensor = linear(x_MC, weight_NC, bias_N, "none", [], "")
            return out
    return F.linear(x_MC, weight_NC, bias_N)


@functools.cache
def onednn_linear() -> Callable[..., Any] | None:
    """Return oneDNN's linear map if PyTorch has it and it computes correctly, else None."""
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None:
        return None
    x = torch.arange(6.0).view(2, 3)
    weight = torch.arange(12.0).view(4, 3)
    try:
        is_right = torch.equal(linear(x, weight, None, "none", [], ""), F.linear(x, weight))
    except RuntimeError:
        return None
    return linear if is_right else None


def linear(x: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, (..., C) → (..., N), by `matmul` if compiled operations are in use."""
    if native_ops_for(x) is None or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight_NC, bias_N)
    out: Tensor = _Linear.apply(x, weight_NC, bias_N)  # type: ignore[no-untyped-call]
    return out


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
        # Only the gradient of the weights needs the input. Frozen weights have no gradient.
        ctx.shape = x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_NC)
        return matmul(x.flatten(0, -2), weight_NC, bias_N).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NC = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            matmul(grad_MN, weight_NC.T).view(ctx.shape) if to_x else None,
            matmul(grad_MN.T, x.flatten(0, -2).T) if to_weight else None,
            grad_MN.sum(0) if to_bias else None,
        )
