"""Split features into attention heads, with RMS norm and rotary positions of queries and keys.

Norm and rotation are written with PyTorch functions and, for a CPU, also in C (`pointwise.c`),
forward and backward.
"""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attnlm.compute.native.structs import CQK
from attnlm.model import rotary
from attnlm.model.ops import data_pointer, native_ops_for
from attnlm.model.ops.pointwise import rms_norm

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (T, D)."""
Gains = tuple[Tensor, Tensor, float]
"""The gains of the RMS norms of queries and keys, each (D), and the epsilon of both."""


def split_heads(
    packed_BTN: Tensor, heads: int, kv_heads: int, gains: Gains | None, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split N = (H + 2K)·D features per token into q (B, H, T, D), and k and v (B, K, T, D).

    Queries and keys are RMS-normalised if `gains` is set (Henry et al., 2020), and then rotated if
    `rotation` is set.
    """
    native = native_ops_for(packed_BTN)
    if native is not None and (gains is not None or rotation is not None):
        query_gain, key_gain, epsilon = gains or (None, None, 0.0)
        cosines_TD, sines_TD = rotation or (None, None)
        split: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(  # type: ignore[no-untyped-call]
            packed_BTN,
            heads,
            kv_heads,
            query_gain,
            key_gain,
            epsilon,
            cosines_TD,
            sines_TD,
            native,
        )
        return split
    query, key, value = _head_views(packed_BTN, heads, kv_heads)
    if gains is not None:
        query_gain, key_gain, epsilon = gains
        query = rms_norm(query, query_gain, epsilon)
        key = rms_norm(key, key_gain, epsilon)
    if rotation is not None:
        query = rotate(query, *rotation)
        key = rotate(key, *rotation)
    return query, key, value


def _head_views(packed_BTN: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    size = packed_BTN.size(-1) // (heads + 2 * kv_heads)
    widths = [heads * size, kv_heads * size, kv_heads * size]
    query, key, value = (
        x.unflatten(-1, (-1, size)).transpose(1, 2) for x in packed_BTN.split(widths, -1)
    )
    return query, key, value


def rotary_angles(
    length: int,
    head_size: int,
    base: float,
    factor: float | None = None,
    context: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Return cosines and sines (length, head_size) of rotary positions (Su et al., 2021).

    Each feature in the first half of a head is paired with one in the second, as in Llama and Qwen.
    """
    if torch.get_default_device().type == "meta":  # a model's skeleton has no numbers
        return torch.empty(length, head_size), torch.empty(length, head_size)
    cosines, sines = map(
        torch.from_numpy, rotary.rotary_angles(length, head_size, base, factor, context)
    )
    return cosines.to(dtype).repeat(1, 2), sines.to(dtype).repeat(1, 2)


def rotate(x: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
    """Return x, (..., T, D), with each pair of features rotated by its angle at each position."""
    cosines_TD = cosines_TD.to(x.dtype)
    sines_TD = sines_TD.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cosines_TD + torch.cat((-second, first), dim=-1) * sines_TD


class _SplitHeads(Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed_BTN: Tensor,
        heads: int,
        kv_heads: int,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        epsilon: float,
        cosines_TD: Tensor | None,
        sines_TD: Tensor | None,
        native: CDLL,
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed_BTN = packed_BTN.contiguous()
        ctx.heads = heads
        ctx.kv_heads = kv_heads
        ctx.native = native
        stride = packed_BTN.size(-1)
        views = _head_views(packed_BTN, heads, kv_heads)
        outs = []
        inverses = []
        for x_BHTD, gain in zip(views, (query_gain, key_gain), strict=False):
            windows, count, length, size = x_BHTD.shape
            out_BTHD = torch.empty(windows, length, count, size)
            inverse = torch.empty(windows * length * count if gain is not None else 0)
            qk = _qk_struct(x_BHTD, stride, gain, cosines_TD, sines_TD, inverse)
            qk.epsilon = epsilon
            qk.out = data_pointer(out_BTHD)
            native.qk_norm_rope(ctypes.byref(qk))
            outs.append(out_BTHD.transpose(1, 2))
            inverses.append(inverse)
        ctx.save_for_backward(packed_BTN, query_gain, key_gain, cosines_TD, sines_TD, *inverses)
        return outs[0], outs[1], views[2].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed_BTN, query_gain, key_gain, cosines_TD, sines_TD, *inverses = ctx.saved_tensors
        d_packed_BTN = torch.empty_like(packed_BTN)
        stride = packed_BTN.size(-1)
        views = _head_views(packed_BTN, ctx.heads, ctx.kv_heads)
        d_views = _head_views(d_packed_BTN, ctx.heads, ctx.kv_heads)
        d_gains = []
        for x_BHTD, d_x, grad, gain, inverse in zip(
            views, d_views, grads, (query_gain, key_gain), inverses, strict=False
        ):
            grad_BTHD = grad.transpose(1, 2).contiguous()
            d_gain = None if gain is None else torch.zeros_like(gain)
            qk = _qk_struct(x_BHTD, stride, gain, cosines_TD, sines_TD, inverse)
            qk.grad = data_pointer(grad_BTHD)
            qk.d_x = data_pointer(d_x)
            qk.d_gain = data_pointer(d_gain)
            ctx.native.qk_norm_rope_backward(ctypes.byref(qk))
            d_gains.append(d_gain)
        d_views[2].copy_(grads[2])
        return d_packed_BTN, None, None, *d_gains, None, None, None, None


def _qk_struct(
    x_BHTD: Tensor,
    stride: int,
    gain: Tensor | None,
    cosines_TD: Tensor | None,
    sines_TD: Tensor | None,
    inverse: Tensor,
) -> CQK:
    """Return the arrays that forward and backward pass have in common."""
    windows, heads, length, size = x_BHTD.shape
    return CQK(
        windows=windows,
        length=length,
        heads=heads,
        size=size,
        stride=stride,
        x=data_pointer(x_BHTD),
        gain=data_pointer(gain),
        cosines=data_pointer(cosines_TD),
        sines=data_pointer(sines_TD),
        inverse=data_pointer(inverse),
    )
