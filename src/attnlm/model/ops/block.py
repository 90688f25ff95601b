"""Compute a transformer's block in C (block.c), with one call for each direction.

Block in language_model.py is the reference implementation. A call replaces about thirty operations
of PyTorch. Matmuls read the weights in place, and add to the gradients in place. Axes as in
attention.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attnlm.compute.native.structs import MLPS, NORMS, CPass, CWeights
from attnlm.model.ops import data_pointer, kernels_in_use, native_ops_for
from attnlm.model.ops.heads import Rotation


@dataclass(frozen=True)
class NativeBlock:
    """The sizes and the parts of a block that block.c can compute."""

    heads: int
    kv_heads: int
    size: int
    hidden: int
    norm: str
    mlp: str
    epsilon: float
    qk_epsilon: float
    weights: Mapping[str, nn.Parameter]
    """Weights and biases by their names in the struct `weights` of block.c."""


def native_block_kernels(x_BTC: Tensor) -> CDLL | None:
    """Return the kernels if blocks are to be computed by block.c for this input, else None."""
    if kernels_in_use().matmul != "native" or torch.is_autocast_enabled("cpu"):
        return None
    has_gradient = x_BTC.requires_grad and torch.is_grad_enabled()
    return native_ops_for(x_BTC) if has_gradient else None


def have_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if block.c can add to the parameters' gradients in place."""
    return all(
        p.grad is not None and p.dtype == torch.float32 and p.is_contiguous()
        and p.grad.is_contiguous()
        for p in parameters
    )  # fmt: skip


def block_pass(
    x_BTC: Tensor,
    block: NativeBlock,
    library: CDLL,
    rotation: Rotation | None,
    attention_factors: Tensor | None,
    mlp_factors: Tensor | None,
) -> Tensor:
    """Return the output of a block, (B, T, C).

    Dropout multiplies the outputs of attention and MLP by the factors, (B, T, C). The backward
    pass adds to the `grad` of each weight, instead of returning the gradients of weights.
    """
    cosines_TD, sines_TD = rotation or (None, None)
    out: Tensor = _BlockPass.apply(  # type: ignore[no-untyped-call]
        x_BTC, block, library, cosines_TD, sines_TD, attention_factors, mlp_factors
    )
    return out


class _BlockPass(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        block: NativeBlock,
        library: CDLL,
        cosines_TD: Tensor | None,
        sines_TD: Tensor | None,
        attention_factors: Tensor | None,
        mlp_factors: Tensor | None,
    ) -> Tensor:
        x_BTC = x_BTC.contiguous()
        windows, length, width = x_BTC.shape
        out_BTC = torch.empty_like(x_BTC)
        ctx.work = CPass(
            windows=windows,
            length=length,
            width=width,
            heads=block.heads,
            kv_heads=block.kv_heads,
            size=block.size,
            hidden=block.hidden,
            norm=NORMS.index(block.norm),
            mlp=MLPS.index(block.mlp),
            epsilon=block.epsilon,
            qk_epsilon=block.qk_epsilon,
            weights=CWeights(**{name: p.data_ptr() for name, p in block.weights.items()}),
            cosines=data_pointer(cosines_TD),  # block_saved reads whether there are any
            out=data_pointer(out_BTC),
        )
        activations = x_BTC.new_empty(library.block_saved(ctypes.byref(ctx.work)))
        saved = (x_BTC, activations, cosines_TD, sines_TD, attention_factors, mlp_factors)
        _run_kernel(library, ctx.work, saved)
        ctx.save_for_backward(*saved)
        ctx.library = library
        ctx.block = block
        return out_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTC: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # others than in the forward pass, if that was computed again
        x_BTC = saved[0]
        d_out_BTC = d_out_BTC.contiguous()
        d_x_BTC = torch.empty_like(x_BTC)
        gradients = {name: data_pointer(p.grad) for name, p in ctx.block.weights.items()}
        ctx.work.gradients = CWeights(**gradients)
        ctx.work.d_out = data_pointer(d_out_BTC)
        ctx.work.d_x = data_pointer(d_x_BTC)
        _run_kernel(ctx.library, ctx.work, saved)
        return d_x_BTC, None, None, None, None, None, None


_SAVED = ("x", "saved", "cosines", "sines", "attention_factors", "mlp_factors")
"""The fields of CPass that point to the tensors which the forward pass saves, in this order."""


def _run_kernel(library: CDLL, work: CPass, saved: Sequence[Tensor | None]) -> None:
    for name, tensor in zip(_SAVED, saved, strict=True):
        setattr(work, name, data_pointer(tensor))
    threads = torch.get_num_threads()
    scratch = torch.empty(library.block_scratch(threads, ctypes.byref(work)))
    work.scratch = data_pointer(scratch)
    library.run_block_pass(threads, ctypes.byref(work))
