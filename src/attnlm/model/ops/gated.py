"""The product of a SwiGLU's two branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import by_hand


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, with both side by side, (..., 2F) → (..., F) (Shazeer, 2020)."""
    if by_hand(gate_up):
        product: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        ctx.save_for_backward(gate_up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        share = gate.sigmoid()
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        swish = gate * share
        torch.mul(grad, swish, out=d_up)
        # silu' = σ + silu (1 − σ)
        slope = share.addcmul_(swish, 1 - share)
        torch.mul(grad, up, out=d_gate).mul_(slope)
        return d_gate_up
