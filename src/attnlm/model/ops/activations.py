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
        return _apply(x, parts, "gelu", x.size(-1))
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, with both side by side, (..., 2F) → (..., F) (Shazeer, 2020)."""
    if (parts := compiled_for(gate_up)) is not None:
        return _apply(gate_up, parts, "swiglu", gate_up.size(-1) // 2)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _apply(x: Tensor, parts: CDLL, name: str, width: int) -> Tensor:
    out: Tensor = _Activation.apply(x, parts, name, width)  # type: ignore[no-untyped-call]
    return out


class _Activation(Function):
    """A compiled function of each row, and its gradient: `name` and `name`_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: CDLL, name: str, width: int) -> Tensor:
        x, out = x.contiguous(), x.new_empty(*x.shape[:-1], width)
        ctx.save_for_backward(x)
        ctx.sizes = out.numel() // width, width
        ctx.backward_of = getattr(parts, f"{name}_backward")
        getattr(parts, name)(*ctx.sizes, x.data_ptr(), out.data_ptr())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad, d_x = grad.contiguous(), torch.empty_like(x)
        ctx.backward_of(*ctx.sizes, x.data_ptr(), grad.data_ptr(), d_x.data_ptr())
        return d_x, None, None, None
