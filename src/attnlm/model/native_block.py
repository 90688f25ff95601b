"""A transformer's block in C (block.c), with one call for each direction.

`Block` is the reference implementation. A call replaces about thirty operations of PyTorch. Matmuls
read the weights in place, and add to the gradients in place. Axes as in layers.py.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attnlm.compute.native.structs import MLPS, NORMS, CPass, CWeights
from attnlm.model.architecture import Architecture
from attnlm.model.language_model import Transformer
from attnlm.model.layers import Rotation
from attnlm.model.spec import ModelSpec, is_ours

_NORMS = {
    "attention_norm": "attention",
    "mlp_norm": "mlp",
    "attention.query_norm": "query",
    "attention.key_norm": "key",
}
_OF_LINEAR = {"weight": "", "bias": "_bias"}
_OF_NORM = {"gain": "_gain", "bias": "_shift"}


def has_native_blocks(spec: ModelSpec) -> bool:
    """Return True if block.c computes the blocks of a model."""
    if not is_ours(spec):
        return False
    return spec.attention == "softmax" and spec.residual and spec.projection


def with_native_blocks(model: Transformer, library: CDLL) -> Transformer:
    """Return a model that shares all but its blocks with `model`, and computes these in C.

    Every parameter must have a gradient, float32 and contiguous, to which the backward pass adds.
    """
    native = copy.copy(model)
    a = model.architecture
    blocks = nn.ModuleList(NativeBlock(block, a, library) for block in model.blocks)
    native._modules = {**model._modules, "blocks": blocks}
    return native


class NativeBlock(nn.Module):
    """A block with softmax attention, a projection and residual connections, in training.

    The backward pass adds to the `grad` of each weight, instead of returning the gradients.
    """

    def __init__(self, block: nn.Module, a: Architecture, library: CDLL) -> None:
        super().__init__()
        self.block = block
        self.library = library
        self.weights = {_name_in_c(name): p for name, p in block.named_parameters()}
        """weights and biases by their names in the struct `weights` of block.c"""
        self.sizes: dict[str, Any] = {
            "heads": a.heads,
            "kv_heads": a.num_kv_heads,
            "size": a.head_dim,
            "hidden": a.mlp_dim,
            "norm": NORMS.index(a.norm),
            "mlp": MLPS.index(a.mlp),
            "epsilon": a.norm_epsilon,
            "qk_epsilon": a.norm_epsilon,
        }

    def forward(
        self, x_BTC: Tensor, rotation: Rotation | None = None, cache: None = None
    ) -> Tensor:
        """Map (B, T, C) → (B, T, C)."""
        dropout: Any = self.block.dropout
        attention_factors = dropout.factors(x_BTC)
        mlp_factors = dropout.factors(x_BTC) if self.sizes["hidden"] else None
        cosines_TD, sines_TD = rotation or (None, None)
        out: Tensor = _BlockPass.apply(  # type: ignore[no-untyped-call]
            x_BTC, self, cosines_TD, sines_TD, attention_factors, mlp_factors
        )
        return out


def _name_in_c(name: str) -> str:
    """Return the name of a block's parameter in C: query_bias for attention.query.bias."""
    owner, _, kind = name.rpartition(".")
    if owner in _NORMS:
        return _NORMS[owner] + _OF_NORM[kind]
    return owner.rpartition(".")[2] + _OF_LINEAR[kind]


class _BlockPass(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        block: NativeBlock,
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
            **block.sizes,
            weights=CWeights(**{name: p.data_ptr() for name, p in block.weights.items()}),
            cosines=data_pointer(cosines_TD),  # block_saved reads whether there are any
            out=data_pointer(out_BTC),
        )
        activations = x_BTC.new_empty(block.library.block_saved(ctypes.byref(ctx.work)))
        saved = (x_BTC, activations, cosines_TD, sines_TD, attention_factors, mlp_factors)
        _run_pass(block.library, ctx.work, saved)
        ctx.save_for_backward(*saved)
        ctx.block = block
        return out_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTC: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        d_out_BTC = d_out_BTC.contiguous()
        d_x_BTC = torch.empty_like(saved[0])
        gradients = {name: data_pointer(p.grad) for name, p in ctx.block.weights.items()}
        ctx.work.gradients = CWeights(**gradients)
        ctx.work.d_out = data_pointer(d_out_BTC)
        ctx.work.d_x = data_pointer(d_x_BTC)
        _run_pass(ctx.block.library, ctx.work, saved)
        return d_x_BTC, None, None, None, None, None


_SAVED = ("x", "saved", "cosines", "sines", "attention_factors", "mlp_factors")
"""The fields of CPass that point to the tensors which the forward pass saves, in this order."""


def _run_pass(library: CDLL, work: CPass, saved: Sequence[Tensor | None]) -> None:
    for name, tensor in zip(_SAVED, saved, strict=True):
        setattr(work, name, data_pointer(tensor))
    threads = torch.get_num_threads()
    scratch = torch.empty(library.block_scratch(threads, ctypes.byref(work)))
    work.scratch = data_pointer(scratch)
    library.run_block_pass(threads, ctypes.byref(work))


def data_pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor's elements, for a compiled function."""
    return None if x is None else x.data_ptr()
