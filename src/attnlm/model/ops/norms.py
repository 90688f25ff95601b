"""RMS norm, and the same of heads that are turned to their positions as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import by_hand


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · gain over the last axis (Zhang and Sennrich, 2019)."""
    if by_hand(x):
        normed: Tensor = _RMSNorm.apply(x, gain, epsilon)  # type: ignore[no-untyped-call]
        return normed
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), epsilon)


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
        d_x = (grad * gain).addcmul_(unit, share).mul_(inverse)
        return d_x, along.sum(tuple(range(grad.ndim - 1))), None


def _inverse_rms(x: Tensor, axis: int, epsilon: float) -> Tensor:
    return x.square().mean(axis, keepdim=True).add_(epsilon).rsqrt_()


def rotary_angles(length: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_size) of rotary positions (Su et al., 2021).

    The two halves of a head hold the pairs, as in Llama and Qwen.
    """
    if torch.get_default_device().type == "meta":  # of a model's skeleton nothing is computed
        return torch.empty(length, head_size), torch.empty(length, head_size)
    frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
    """Turns each pair of numbers in a head by the angle of its position: (..., T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines_TD + torch.cat((-second, first), dim=-1) * sines_TD


def normed_and_turned(
    x_BHTD: Tensor, gain_D: Tensor, epsilon: float, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """Heads RMS-normalised, with a gain, and turned: `rotate(rms_norm(x, gain, ε), *rotation)`.

    `rotation` holds the cosines and sines, each (T, D), of the T tokens' positions. The result
    lies (B, H, D, T) in memory, as `short_attention` wants it.
    """
    if x_BHTD.size(-2) > 1 and by_hand(x_BHTD):
        turned: Tensor = _NormedAndTurned.apply(x_BHTD, gain_D, epsilon, *rotation)  # type: ignore[no-untyped-call]
        return turned.mT
    return rotate(rms_norm(x_BHTD, gain_D, epsilon), *rotation)


class _NormedAndTurned(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BHTD: Tensor,
        gain_D: Tensor,
        epsilon: float,
        cosines_TD: Tensor,
        sines_TD: Tensor,
    ) -> Tensor:
        unit = x_BHTD.mT.contiguous()
        inverse = _inverse_rms(unit, -2, epsilon)
        unit = unit * inverse
        cosines_DT, sines_DT = cosines_TD.mT.contiguous(), sines_TD.mT.contiguous()
        ctx.save_for_backward(unit, inverse, gain_D, cosines_DT, sines_DT)
        return _turned(unit * gain_D[:, None], cosines_DT, sines_DT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHDT: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain_D, cosines_DT, sines_DT = ctx.saved_tensors
        d_x = _turned(grad_BHDT, cosines_DT, -sines_DT)
        along = d_x * unit
        d_gain_D = along.sum((0, 1, 3))
        share = along.mul_(gain_D[:, None]).sum(-2, keepdim=True).div_(-unit.size(-2))
        d_x.mul_(gain_D[:, None]).addcmul_(unit, share).mul_(inverse)
        return d_x.mT, d_gain_D, None, None, None


def _turned(x_BHDT: Tensor, cosines_DT: Tensor, sines_DT: Tensor) -> Tensor:
    half = x_BHDT.size(-2) // 2
    out = x_BHDT * cosines_DT
    out[..., :half, :].addcmul_(x_BHDT[..., half:, :], sines_DT[:half], value=-1)
    out[..., half:, :].addcmul_(x_BHDT[..., :half, :], sines_DT[half:])
    return out
