"""Forward and backward passes written out for the CPU, each equal to a plain form beside it.

There autograd's many short passes over memory cost as much as the products. Heads are kept with
their features first, (D, T): a product with many columns runs several times faster than one that
is as narrow as a head. Axes as in attention.py; N counts heads of all windows, B·H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def suits(x: Tensor) -> bool:
    """Whether these forms are the faster ones here: in full precision on a CPU, not compiled."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """softmax(mask(scale · q kᵀ)) v for (..., T, D), (..., T, D), (..., T, E) → (..., T, E)."""
    mixed: Tensor = _Attention.apply(query, key, value, causal, scale)  # type: ignore[no-untyped-call]
    return mixed


def causal_mask(length: int, like: Tensor) -> Tensor:
    """0 where query t may look, −∞ where key s > t: (T, T)."""
    return torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> Tensor:
        q_NDT, k_NDT, v_NET = (
            x.mT.reshape(-1, x.size(-1), x.size(-2)) for x in (query, key, value)
        )
        length = q_NDT.size(-1)
        if causal:
            mask_TT = causal_mask(length, q_NDT)
            scores_NTT = torch.baddbmm(mask_TT, q_NDT.mT, k_NDT, alpha=scale)
        else:
            scores_NTT = torch.bmm(q_NDT.mT, k_NDT).mul_(scale)
        weights_NTT = torch.softmax(scores_NTT, -1)
        ctx.save_for_backward(q_NDT, k_NDT, v_NET, weights_NTT)
        ctx.scale, ctx.shapes = scale, (query.mT.shape, key.mT.shape, value.mT.shape)
        mixed_NET = torch.bmm(v_NET, weights_NTT.mT)
        return mixed_NET.view(*value.shape[:-2], value.size(-1), length).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_NDT, k_NDT, v_NET, weights_NTT = ctx.saved_tensors
        g_NET = grad.mT.reshape(v_NET.shape)
        dv_NET = torch.bmm(g_NET, weights_NTT)
        ds_NTT = softmax_backward_(torch.bmm(g_NET.mT, v_NET), weights_NTT)
        dq_NDT = torch.bmm(k_NDT, ds_NTT.mT).mul_(ctx.scale)
        dk_NDT = torch.bmm(q_NDT, ds_NTT).mul_(ctx.scale)
        grads = zip((dq_NDT, dk_NDT, dv_NET), ctx.shapes, strict=True)
        return (*(d.view(shape).mT for d, shape in grads), None, None)


def softmax_backward_(grad: Tensor, weights: Tensor) -> Tensor:
    """In place, the gradient before a softmax over the last axis from the one after it."""
    grad.mul_(weights)
    return grad.addcmul_(weights, grad.sum(-1, keepdim=True), value=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, with both in one tensor, (..., 2F) → (..., F) (Shazeer, 2020)."""
    product: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return product


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        ctx.save_for_backward(gate_up)
        return torch.nn.functional.silu(gate).mul_(up)

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


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · gain over the last axis (Zhang and Sennrich, 2019)."""
    normed: Tensor = _RMSNorm.apply(x, gain, epsilon)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        inverse = _inverse_rms(x, -1, epsilon)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, gain)
        return unit * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain = ctx.saved_tensors
        along = grad * unit
        share = (along @ gain).div_(-gain.numel()).unsqueeze(-1)
        dx = (grad * gain).addcmul_(unit, share).mul_(inverse)
        return dx, along.sum(tuple(range(grad.ndim - 1))), None


def _inverse_rms(x: Tensor, axis: int, epsilon: float) -> Tensor:
    return x.square().mean(axis, keepdim=True).add_(epsilon).rsqrt_()


def rotary_heads(
    packed_BTC: Tensor,
    gains_2D: Tensor,
    rotation: tuple[Tensor, Tensor],
    epsilon: float,
) -> Tensor:
    """Queries, keys and values, (B, T, 3·H·D) → (3, B, H, T, D).

    Of each head, queries and keys are RMS-normalised with the gains (2, D), then turned by the
    angles of their positions, cosines and sines (T, D).
    """
    heads: Tensor = _RotaryHeads.apply(packed_BTC, gains_2D, *rotation, epsilon)  # type: ignore[no-untyped-call]
    return heads.mT


class _RotaryHeads(Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed_BTC: Tensor,
        gains_2D: Tensor,
        cosines_TD: Tensor,
        sines_TD: Tensor,
        epsilon: float,
    ) -> Tensor:
        batch, length, width = packed_BTC.shape
        size = gains_2D.size(-1)
        split = packed_BTC.view(batch, length, 3, width // (3 * size), size).permute(2, 0, 3, 4, 1)
        heads_3BHDT = torch.empty(split.shape, dtype=split.dtype)
        heads_3BHDT[2].copy_(split[2])
        unit = torch.empty_like(heads_3BHDT[:2]).copy_(split[:2])
        inverse = _inverse_rms(unit, -2, epsilon)
        unit.mul_(inverse)
        cosines_DT, sines_DT = cosines_TD.mT.contiguous(), sines_TD.mT.contiguous()
        _turn(unit * gains_2D[:, None, None, :, None], cosines_DT, sines_DT, heads_3BHDT[:2])
        ctx.save_for_backward(unit, inverse, gains_2D, cosines_DT, sines_DT)
        return heads_3BHDT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_3BHDT: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gains_2D, cosines_DT, sines_DT = ctx.saved_tensors
        size = unit.size(-2)
        turned = torch.empty_like(unit)
        _turn(grad_3BHDT[:2], cosines_DT, -sines_DT, turned)
        along = turned * unit
        dgains_2D = along.sum((1, 2, 4))
        gains = gains_2D[:, None, None, :, None]
        share = along.mul_(gains).sum(-2, keepdim=True).div_(-size)
        turned.mul_(gains).addcmul_(unit, share).mul_(inverse)
        _, batch, heads, _, length = grad_3BHDT.shape
        dpacked = turned.new_empty(batch, length, 3, heads, size)
        split = dpacked.permute(2, 0, 3, 4, 1)
        split[:2].copy_(turned)
        split[2].copy_(grad_3BHDT[2])
        return dpacked.view(batch, length, -1), dgains_2D, None, None, None


def _turn(x: Tensor, cosines_DT: Tensor, sines_DT: Tensor, out: Tensor) -> None:
    """Into `out`, x (..., D, T) with each pair of features turned by its angle."""
    half = x.size(-2) // 2
    torch.mul(x, cosines_DT, out=out)
    out[..., :half, :].addcmul_(x[..., half:, :], sines_DT[:half], value=-1)
    out[..., half:, :].addcmul_(x[..., :half, :], sines_DT[half:])
