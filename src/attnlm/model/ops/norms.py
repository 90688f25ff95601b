"""RMS norm."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import compiled_for


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · gain over the last axis (Zhang and Sennrich, 2019)."""
    if (parts := compiled_for(x)) is not None:
        normed: Tensor = _RMSNorm.apply(x, gain, epsilon, parts)  # type: ignore[no-untyped-call]
        return normed
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), epsilon)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, parts: CDLL) -> Tensor:
        x, out = x.contiguous(), torch.empty(x.shape)
        width = gain.numel()
        inverse = torch.empty(x.numel() // width)
        ctx.save_for_backward(x, gain, inverse)
        ctx.parts = parts
        places = (x.data_ptr(), gain.data_ptr(), out.data_ptr(), inverse.data_ptr())
        parts.rms_norm(len(inverse), width, epsilon, *places)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        grad, d_x, d_gain = grad.contiguous(), torch.empty_like(x), torch.zeros_like(gain)
        ctx.parts.rms_norm_backward(
            *(len(inverse), gain.numel(), inverse.data_ptr(), x.data_ptr(), gain.data_ptr()),
            *(grad.data_ptr(), d_x.data_ptr(), d_gain.data_ptr()),
        )
        return d_x, d_gain, None, None
