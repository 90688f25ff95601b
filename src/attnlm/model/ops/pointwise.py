"""Operations on one token's features: activations and RMS norm.

Each operation is written with PyTorch functions and, for a CPU, also in C (`pointwise.c`), forward
and backward.
"""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import data_pointer, native_ops_for


def gelu(x: Tensor) -> Tensor:
    """Return GELU (Hendrycks and Gimpel, 2016), with GPT-2's tanh approximation."""
    if (native := native_ops_for(x)) is not None:
        return _apply_native(x, native, "gelu", x.size(-1))
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up of concatenated gate and up, (..., 2F) → (..., F) (Shazeer, 2020)."""
    if (native := native_ops_for(gate_up)) is not None:
        return _apply_native(gate_up, native, "swiglu", gate_up.size(-1) // 2)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _apply_native(x: Tensor, native: CDLL, name: str, width: int) -> Tensor:
    out: Tensor = _Activation.apply(x, native, name, width)  # type: ignore[no-untyped-call]
    return out


class _Activation(Function):
    """An autograd function: it applies the C function `name` to each row, and computes the gradient
    with the C function `name`_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, native: CDLL, name: str, width: int) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], width)
        ctx.save_for_backward(x)
        ctx.rows = out.numel() // width
        ctx.width = width
        ctx.backward_of = getattr(native, f"{name}_backward")
        getattr(native, name)(ctx.rows, width, data_pointer(x), data_pointer(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = torch.empty_like(x)
        pointers = map(data_pointer, (x, grad, d_x))
        ctx.backward_of(ctx.rows, ctx.width, *pointers)
        return d_x, None, None, None


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return x / √(mean x² + ε) · gain over the last axis (Zhang and Sennrich, 2019)."""
    if (native := native_ops_for(x)) is not None:
        normed: Tensor = _RMSNorm.apply(x, gain, epsilon, native)  # type: ignore[no-untyped-call]
        return normed
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), epsilon)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, native: CDLL) -> Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape)
        inverse = torch.empty(x.numel() // gain.numel())
        ctx.save_for_backward(x, gain, inverse)
        ctx.native = native
        pointers = map(data_pointer, (x, gain, out, inverse))
        native.rms_norm(len(inverse), gain.numel(), epsilon, *pointers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        d_x = torch.empty_like(x)
        d_gain = torch.zeros_like(gain)
        grad = grad.contiguous()
        pointers = map(data_pointer, (inverse, x, gain, grad, d_x, d_gain))
        ctx.native.rms_norm_backward(len(inverse), gain.numel(), *pointers)
        return d_x, d_gain, None, None
