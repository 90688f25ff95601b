"""Causal attention, by PyTorch's kernel or, for a CPU, in C: a block of scores at a time."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.compute.native import library
from attnlm.model.ops import compiled_for, kernels_in_use, place
from attnlm.model.ops.attention import shared_heads

_ALONE = 2**22
"""Multiplications: with fewer, a second thread costs more than it saves."""


def attention_in_blocks() -> CDLL | None:
    """Attention in C; None where there is no compiler."""
    return library("attention.c", "-fopenmp") or library("attention.c")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return the attention of queries (B, H, T, D) to keys (B, K, T, D) up to their own."""
    wanted = kernels_in_use().attention == "native" and compiled_for(query) is not None
    is_plain = key.shape == value.shape and not torch.is_autocast_enabled("cpu")
    if wanted and is_plain and attention_in_blocks() is not None:
        scale = query.size(-1) ** -0.5 if scale is None else scale
        mixed: Tensor = Blocks.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
        return mixed
    key, value = shared_heads(query.size(-3), key, value)
    is_causal = query.size(-2) > 1
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


class Blocks(Function):
    """By attention.c, which makes the same numbers with any number of threads."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value = map(_with_rows, given[:3])
        ctx.scale = given[3]
        out, log_sums = _like(query), query.new_empty(query.shape[:3])
        _call("attend", ctx.scale, (query, key, value, out), log_sums, ())
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *heads, log_sums = ctx.saved_tensors
        gradients = [_like(x) for x in heads[:3]]
        _call("attend_backward", ctx.scale, heads, log_sums, [_with_rows(d_out), *gradients])
        return *gradients, None


def _with_rows(x_BHTD: Tensor) -> Tensor:
    """With each token's numbers of a head side by side."""
    return x_BHTD if x_BHTD.stride(-1) == 1 else x_BHTD.contiguous()


def _like(x_BHTD: Tensor) -> Tensor:
    """Room for as many numbers, where a token's heads lie side by side."""
    windows, heads, length, size = x_BHTD.shape
    return x_BHTD.new_empty(windows, length, heads, size).transpose(1, 2)


def _call(name: str, scale: float, heads: Any, log_sums: Tensor, gradients: Any) -> None:
    (windows, count, length, size), pieces = heads[0].shape, heads[1].size(0) * heads[1].size(1)
    work = windows * count * length * length * size
    threads = min(torch.get_num_threads(), pieces) if work >= _ALONE else 1
    compiled = attention_in_blocks()
    assert compiled is not None
    scratch = log_sums.new_empty(threads, compiled.attention_scratch(length, size))
    getattr(compiled, name)(
        *(threads, windows, count, heads[1].size(1), length, size, scale),
        *map(_where, heads),
        place(log_sums),
        *map(_where, gradients),
        place(scratch),
    )


def _where(x_BHTD: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """The place of heads, and the numbers from a window, head and token to the next."""
    return (ctypes.c_int64 * 4)(x_BHTD.data_ptr(), *x_BHTD.stride()[:3])
