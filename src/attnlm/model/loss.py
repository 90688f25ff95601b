"""Cross-entropy with the LM head's matmul; only some of the logits are in memory at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.layers import linear

LOGITS_AT_ONCE = {"cpu": 3 * 2**21, "mps": 2**24, "cuda": 2**26, "meta": 2**26}
"""The most logits in memory at a time, by type of device. On a CPU, these logits and the LM
head's weights fit the last-level cache."""


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean loss in nats per token, computed in float32 at least.

    Targets below 0, such as -100, are ignored. If all are, the loss is 0.
    """
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    targets_M = targets_BT.flatten().clamp(min=-1)
    total = F.cross_entropy(logits_BTV.flatten(0, -2), targets_M, ignore_index=-1, reduction="sum")
    return total / count_targets(targets_BT)


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored, (), but at least 1."""
    return (targets >= 0).sum().clamp(min=1)


def linear_cross_entropy(
    x_BTC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_BT: Tensor
) -> Tensor:
    """Return `cross_entropy(x Wᵀ + b, targets)`, computed a few tokens at a time.

    The gradient is computed in the forward pass, since logits are not kept for the backward pass
    (Hsu et al., 2024, "Liger Kernel"). Under autocast, the precision of autocast is used.
    """
    logits = x_BTC.numel() // x_BTC.size(-1) * weight_VC.size(0)
    if torch.compiler.is_compiling() or logits <= LOGITS_AT_ONCE[x_BTC.device.type]:
        return cross_entropy(linear(x_BTC, weight_VC, bias_V), targets_BT)
    device = x_BTC.device.type
    if torch.is_autocast_enabled(device):
        x_BTC = x_BTC.to(torch.get_autocast_dtype(device))
    x_MC = x_BTC.flatten(0, -2)
    targets_M = targets_BT.flatten()
    if torch.is_grad_enabled():
        loss: Tensor = _LinearCrossEntropy.apply(x_MC, weight_VC, bias_V, targets_M)  # type: ignore[no-untyped-call]
        return loss
    return _loss_in_pieces(x_MC, weight_VC, bias_V, targets_M, None)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x_MC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_M: Tensor
    ) -> Tensor:
        # A sum of many pieces' gradients in bfloat16 would be 2% wrong.
        precise = torch.promote_types(weight_VC.dtype, torch.float32)
        d_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=precise)
        d_weight_VC = torch.zeros_like(weight_VC, dtype=precise)
        ctx.gradients = torch.empty_like(x_MC), d_weight_VC, d_bias_V
        return _loss_in_pieces(x_MC, weight_VC, bias_V, targets_M, ctx.gradients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if not grad.is_cpu or grad != 1:  # on other devices, reading `grad` would wait
            gradients = [None if d is None else d * grad for d in gradients]
        return *gradients, None


_Gradients = tuple[Tensor, Tensor, Tensor | None] | None
"""Tensors that receive the gradients of x (M, C), weights (V, C) and, if there is one, bias (V); or
only None if no gradient is needed. The gradient of x replaces the content of its tensor. The
gradients of weights and bias are added to the content of theirs."""


def _loss_in_pieces(
    x_MC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_M: Tensor, into: _Gradients
) -> Tensor:
    lm_head_VC = weight_VC.to(x_MC.dtype)
    bias_V = None if bias_V is None else bias_V.to(x_MC.dtype)
    precise = torch.promote_types(x_MC.dtype, torch.float32)
    total = torch.zeros((), dtype=precise, device=x_MC.device)
    vocab_size = lm_head_VC.size(0)
    at_once = max(1, LOGITS_AT_ONCE[x_MC.device.type] // vocab_size)
    count = count_targets(targets_M)
    # Matmuls in half precision on CUDA are several times slower if a size is not a multiple of 8.
    missing = -vocab_size % 8 if x_MC.is_cuda and x_MC.itemsize == 2 else 0
    if missing:
        lm_head_VC = F.pad(lm_head_VC, (0, 0, 0, missing))
        bias_V = None if bias_V is None else F.pad(bias_V, (0, missing))
    with torch.autocast(x_MC.device.type, enabled=False):
        for rows in (slice(i, i + at_once) for i in range(0, len(targets_M), at_once)):
            logits_mV = linear(x_MC[rows], lm_head_VC, bias_V)[:, :vocab_size].to(precise)
            is_counted_m1 = targets_M[rows, None] >= 0
            targets_m1 = targets_M[rows, None].clamp(min=0)
            top_m1, likeliest_m1 = logits_mV.max(-1, keepdim=True)
            at_target_m1 = logits_mV.gather(-1, targets_m1)
            in_place = None if x_MC.is_mps else logits_mV  # Metal does not promise that out= works
            p_mV = torch.softmax(logits_mV, -1, out=in_place)
            # −log p of the likeliest token, plus its logit minus the target's: no p underflows.
            losses_m1 = top_m1 - at_target_m1 - p_mV.gather(-1, likeliest_m1).log()
            total += (losses_m1 * is_counted_m1).sum()
            if into is None:
                continue
            d_logits_mV = p_mV.scatter_add_(-1, targets_m1, torch.full_like(top_m1, -1.0))
            d_logits_mV = d_logits_mV.mul_(is_counted_m1 / count).to(x_MC.dtype)
            if missing:
                d_logits_mV = F.pad(d_logits_mV, (0, missing))
            d_x_MC, d_lm_head_VC, d_bias_V = into
            d_x_MC[rows] = linear(d_logits_mV, lm_head_VC.T)
            d_lm_head_VC += linear(d_logits_mV.T, x_MC[rows].T)[:vocab_size]
            if d_bias_V is not None:
                d_bias_V += d_logits_mV.sum(0)[:vocab_size]
    return total / count
