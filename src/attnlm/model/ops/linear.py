"""Linear maps: one, or several of one input as one product, with their low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import compiled_for
from attnlm.model.ops.products import product


class Map(Protocol):
    """x Wᵀ + b and, with an adapter, scale · x Aᵀ Bᵀ."""

    weight: Any
    bias: Any
    lora_down: Any
    lora_up: Any
    lora_scale: float

    def __call__(self, x: Tensor) -> Tensor: ...


def linear(x: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: (..., C) → (..., N). Where compiled parts are asked for, by `product`."""
    if compiled_for(x) is None or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight_NC, bias_N)
    out: Tensor = _Linear.apply(x, weight_NC, bias_N)  # type: ignore[no-untyped-call]
    return out


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NC)
        return product(x.flatten(0, -2), weight_NC, bias_N).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NC = ctx.saved_tensors
        grad_MN, (to_x, to_weight, to_bias) = grad.flatten(0, -2), ctx.needs_input_grad
        return (
            product(grad_MN, weight_NC.T).view(x.shape) if to_x else None,
            product(grad_MN.T, x.flatten(0, -2).T) if to_weight else None,
            grad_MN.sum(0) if to_bias else None,
        )


def joined_linear(x: Tensor, maps: Sequence[Map], *, joins_weights: bool = True) -> Tensor:
    """The outputs of `maps` side by side: (..., C) → (..., N), N the sum of their widths.

    To join the weights is faster; autograd then keeps a copy of them.
    """
    if not joins_weights:
        return torch.cat([m(x) for m in maps], dim=-1)
    weight_NC, bias_N = side_by_side([m.weight for m in maps]), _joined_biases(maps)
    if any(m.weight.requires_grad for m in maps):
        return linear(x, weight_NC, bias_N)
    if not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return _plain_adapted(x, weight_NC, bias_N, maps)
    columns, end = [], 0
    for m in maps:
        begin, end = end, end + len(m.weight)
        if m.lora_down is not None:
            columns.append((slice(begin, end), m.lora_scale))
    adapters = [t for m in maps if m.lora_down is not None for t in (m.lora_down, m.lora_up)]
    arguments = x, weight_NC, bias_N, columns, *adapters
    out: Tensor = _Frozen.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Matrices (N, C) as one: a view of those that lie so in memory already, else a copy."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(weight.requires_grad for weight in weights):
        return torch.cat(list(weights))
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for weight in weights:
        is_next = weight.untyped_storage().data_ptr() == storage and weight.data_ptr() == end
        if not is_next or not weight.is_contiguous():
            return torch.cat(list(weights))
        end += weight.numel() * weight.element_size()
    return first.as_strided((sum(map(len, weights)), first.size(1)), (first.size(1), 1))


def _joined_biases(maps: Sequence[Map]) -> Tensor | None:
    biases: list[Tensor] = [m.bias for m in maps if m.bias is not None]
    if len(biases) < 2:
        return biases[0] if biases else None
    return torch.cat(biases)


def _plain_adapted(
    x: Tensor, weight_NC: Tensor, bias_N: Tensor | None, maps: Sequence[Map]
) -> Tensor:
    out = F.linear(x, weight_NC, bias_N)
    if all(m.lora_down is None for m in maps):
        return out
    changes = [
        out.new_zeros(()).expand(*x.shape[:-1], len(m.weight))
        if m.lora_down is None
        else F.linear(F.linear(x, m.lora_down), m.lora_up) * m.lora_scale
        for m in maps
    ]
    return out + torch.cat(changes, dim=-1)


class _Frozen(Function):
    """Maps that don't change, and their adapters: all A in one product, each B in place.

    Of `columns` each adapter has its own, and its scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NC: Tensor,
        bias_N: Tensor | None,
        columns: list[tuple[slice, float]],
        *adapters: Tensor,
    ) -> Tensor:
        x_MC, ctx.shape, ctx.columns = x.flatten(0, -2), x.shape, columns
        downs, ups = adapters[::2], adapters[1::2]
        out_MN = product(x_MC, weight_NC, bias_N)
        if not downs:
            ctx.save_for_backward(weight_NC)
            return out_MN.view(*x.shape[:-1], -1)
        ctx.ranks = [len(down) for down in downs]
        down_RC = torch.cat(downs)
        inner_MR = x_MC @ down_RC.T
        for (part, scale), up_nr, inner_Mr in zip(
            columns, ups, inner_MR.split(ctx.ranks, 1), strict=True
        ):
            out_MN[:, part].addmm_(inner_Mr, up_nr.T, alpha=scale)
        ctx.save_for_backward(weight_NC, x_MC, inner_MR, down_RC, *ups)
        return out_MN.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weight_NC, *rest = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        d_x_MC = product(grad_MN, weight_NC.T) if ctx.needs_input_grad[0] else None
        d_adapters = _adapters_backward(ctx, grad_MN, d_x_MC, *rest) if rest else ()
        d_x = None if d_x_MC is None else d_x_MC.view(ctx.shape)
        return d_x, None, None, None, *d_adapters


def _adapters_backward(
    ctx: Any,
    grad_MN: Tensor,
    d_x_MC: Tensor | None,
    x_MC: Tensor,
    inner_MR: Tensor,
    down_RC: Tensor,
    *ups: Tensor,
) -> list[Tensor]:
    """The gradients of all A and B; that of x is added to."""
    d_inner_MR, d_ups = torch.empty_like(inner_MR), []
    inners = (t.split(ctx.ranks, 1) for t in (inner_MR, d_inner_MR))
    for (part, scale), up_nr, inner_Mr, d_inner_Mr in zip(ctx.columns, ups, *inners, strict=True):
        torch.mm(grad_MN[:, part], up_nr * scale, out=d_inner_Mr)
        d_ups.append(grad_MN[:, part].T @ (inner_Mr * scale))
    if d_x_MC is not None:
        d_x_MC.addmm_(d_inner_MR, down_RC)
    d_downs = (d_inner_MR.T @ x_MC).split(ctx.ranks)
    return [d for pair in zip(d_downs, d_ups, strict=True) for d in pair]
