"""What an MLP does between its maps."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import compiled_for


def gelu(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel, 2016), in GPT-2's form with tanh."""
    if (parts := compiled_for(x)) is not None:
        out: Tensor = _GELU.apply(x, parts)  # type: ignore[no-untyped-call]
        return out
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, with both side by side, (..., 2F) → (..., F) (Shazeer, 2020)."""
    if (parts := compiled_for(gate_up)) is not None:
        product: Tensor = _SwiGLU.apply(gate_up, parts)  # type: ignore[no-untyped-call]
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: CDLL) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.parts = parts
        out = torch.empty_like(x)
        parts.gelu(x.numel(), x.data_ptr(), out.data_ptr())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad, d_x = grad.contiguous(), torch.empty_like(x)
        ctx.parts.gelu_backward(x.numel(), x.data_ptr(), grad.data_ptr(), d_x.data_ptr())
        return d_x, None


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, parts: CDLL) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.parts = parts
        width = gate_up.size(-1) // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        parts.swiglu(out.numel() // width, width, gate_up.data_ptr(), out.data_ptr())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad, d_gate_up = grad.contiguous(), torch.empty_like(gate_up)
        width = grad.size(-1)
        ctx.parts.swiglu_backward(
            *(grad.numel() // width, width),
            *(gate_up.data_ptr(), grad.data_ptr(), d_gate_up.data_ptr()),
        )
        return d_gate_up, None
