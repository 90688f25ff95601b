"""Kernels of attention: PyTorch's, and one in C. Neither keeps all scores in memory."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.compute.native.structs import CAttention, CHeads
from attnlm.model.ops import data_pointer, kernels_in_use, native_ops_for

_LEAST_SHARED_WORK = 2**22
"""Number of multiplications below which a second thread costs more than it saves."""


def shared_heads(heads: int, *kv: Tensor) -> tuple[Tensor, ...]:
    """Return keys or values (B, K, S, D) repeated for all query heads, (B, H, S, D)."""
    return tuple(
        x if x.size(-3) == heads else x.repeat_interleave(heads // x.size(-3), dim=-3) for x in kv
    )


def fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of queries (B, H, T, D) to keys (B, K, S, D), by the kernel in use.

    The kernel in C computes attention without a cache.
    """
    new = query.size(-2)
    total = key.size(-2)
    is_plain = new == total and key.shape == value.shape
    native = native_ops_for(query) if kernels_in_use().attention == "native" else None
    if native is not None and is_plain and not torch.is_autocast_enabled("cpu"):
        scale = query.size(-1) ** -0.5
        out: Tensor = NativeAttention.apply(query, key, value, scale, native)  # type: ignore[no-untyped-call]
        return out
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    in_groups = key.size(-3) < query.size(-3) and mask is None and reads_groups(query)
    if not in_groups:
        key, value = shared_heads(query.size(-3), key, value)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=1 < new == total, enable_gqa=in_groups
    )


def reads_groups(query: Tensor) -> bool:
    """Return True if query heads that share keys and values should read them in place, not copies.

    On CUDA, only PyTorch's flash kernel can read them in place, and it needs half precision. On a
    CPU, copies are faster.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
    return query.is_cuda and is_half


class NativeAttention(Function):
    """Attention, computed in attention.c by blocks of scores.

    The number of threads does not change the result.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, native: CDLL
    ) -> Tensor:
        query = _with_adjacent_features(query)
        key = _with_adjacent_features(key)
        value = _with_adjacent_features(value)
        out = _empty_like(query)
        log_sums = query.new_empty(query.shape[:3])
        ctx.scale = scale
        ctx.native = native
        ctx.save_for_backward(query, key, value, out, log_sums)
        _run_kernel(native, _attention_struct(query, key, value, out, log_sums, scale))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        d_out = _with_adjacent_features(d_out)
        d_query = _empty_like(query)
        d_key = _empty_like(key)
        d_value = _empty_like(value)
        arrays = _attention_struct(query, key, value, out, log_sums, ctx.scale)
        arrays.d_out = _heads_struct(d_out)
        arrays.d_query = _heads_struct(d_query)
        arrays.d_key = _heads_struct(d_key)
        arrays.d_value = _heads_struct(d_value)
        _run_kernel(ctx.native, arrays)
        return d_query, d_key, d_value, None, None


def _with_adjacent_features(x_BHTD: Tensor) -> Tensor:
    """Return x with the D features of a head adjacent in memory."""
    return x_BHTD if x_BHTD.stride(-1) == 1 else x_BHTD.contiguous()


def _empty_like(x_BHTD: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape of x, in the memory layout (B, T, H, D)."""
    windows, heads, length, size = x_BHTD.shape
    return x_BHTD.new_empty(windows, length, heads, size).transpose(1, 2)


def _attention_struct(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, scale: float
) -> CAttention:
    """Return the arrays of the forward pass."""
    windows, heads, length, size = query.shape
    return CAttention(
        windows=windows,
        heads=heads,
        kv_heads=key.size(1),
        length=length,
        size=size,
        scale=scale,
        query=_heads_struct(query),
        key=_heads_struct(key),
        value=_heads_struct(value),
        out=_heads_struct(out),
        log_sums=data_pointer(log_sums),
    )


def _heads_struct(x_BHTD: Tensor) -> CHeads:
    """Return the address of x, and its strides in elements along B, H and T."""
    window, head, token = x_BHTD.stride()[:3]
    return CHeads(data=data_pointer(x_BHTD), window=window, head=head, token=token)


def _run_kernel(native: CDLL, arrays: CAttention) -> None:
    """Compute the output or, if `arrays` has the output's gradient, the other gradients."""
    pieces = arrays.windows * arrays.kv_heads
    work = arrays.windows * arrays.heads * arrays.length**2 * arrays.size
    threads = min(torch.get_num_threads(), pieces) if work >= _LEAST_SHARED_WORK else 1
    scratch = torch.empty(threads, native.attention_scratch(arrays.length, arrays.size))
    arrays.scratch = data_pointer(scratch)
    native.attend(threads, ctypes.byref(arrays))
