"""The loss of a prediction, with the product that makes it: all logits are never held at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attnlm.model.ops import compiled_for

LOGITS_AT_ONCE = {"cpu": 3 * 2**21, "mps": 2**24, "cuda": 2**26}
"""On a CPU, as many as share its last cache with the weights that they come from."""


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean loss in nats per token, computed in float32 at least."""
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


def linear_cross_entropy(
    x_BTC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_BT: Tensor
) -> Tensor:
    """`cross_entropy(x Wᵀ + b, targets)`, a few tokens at a time.

    The gradient is made on the way forward, since the logits are not there any more on the way
    back (Hsu et al., 2024, "Liger Kernel"). In autocast's precision where that is on.
    """
    logits = x_BTC.numel() // x_BTC.size(-1) * weight_VC.size(0)
    if torch.compiler.is_compiling() or logits <= LOGITS_AT_ONCE[x_BTC.device.type]:
        return cross_entropy(F.linear(x_BTC, weight_VC, bias_V), targets_BT)
    device = x_BTC.device.type
    if torch.is_autocast_enabled(device):
        x_BTC = x_BTC.to(torch.get_autocast_dtype(device))
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_BTC.flatten(0, -2), weight_VC, bias_V, targets_BT.flatten()
    )
    return loss


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x_MC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_M: Tensor
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        precise = torch.promote_types(x_MC.dtype, torch.float32)
        head_VC = weight_VC.to(x_MC.dtype)
        bias = None if bias_V is None else bias_V.to(x_MC.dtype)
        total = torch.zeros((), dtype=torch.float64 if x_MC.is_cpu else precise, device=x_MC.device)
        d_x_MC, d_weight_VC, d_bias_V = torch.empty_like(x_MC), None, None
        if wanted:
            d_weight_VC = torch.zeros_like(weight_VC)
            d_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        at_once = max(1, LOGITS_AT_ONCE[x_MC.device.type] // weight_VC.size(0))
        for part in (slice(i, i + at_once) for i in range(0, len(targets_M), at_once)):
            with torch.autocast(x_MC.device.type, enabled=False):
                logits_mV = F.linear(x_MC[part], head_VC, bias).to(precise)
                scale = 1 / len(targets_M) if wanted else 0.0
                _add_loss(total, logits_mV, targets_M[part], scale)
                if d_weight_VC is None:
                    continue
                d_logits_mV = logits_mV.to(x_MC.dtype)
                torch.mm(d_logits_mV, head_VC, out=d_x_MC[part])
                if d_weight_VC.dtype == d_logits_mV.dtype:
                    d_weight_VC.addmm_(d_logits_mV.T, x_MC[part])
                else:
                    d_weight_VC += d_logits_mV.T @ x_MC[part]
                if d_bias_V is not None:
                    d_bias_V += d_logits_mV.sum(0)
        ctx.gradients = d_x_MC, d_weight_VC, d_bias_V
        return (total / len(targets_M)).to(precise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if grad != 1:
            ctx.gradients = [None if d is None else d.mul_(grad) for d in ctx.gradients]
        return *ctx.gradients, None


def _add_loss(total: Tensor, logits_mV: Tensor, targets_m: Tensor, scale: float) -> None:
    """Adds the summed loss to `total`; unless `scale` is 0, logits become `scale` · gradient."""
    if (parts := compiled_for(logits_mV)) is not None:
        targets_m = targets_m.contiguous()
        places = logits_mV.data_ptr(), targets_m.data_ptr(), total.data_ptr()
        parts.cross_entropy_rows(*logits_mV.shape, scale, *places)
        return
    targets_m1 = targets_m[:, None]
    top_m1, likeliest_m1 = logits_mV.max(-1, keepdim=True)
    at_target_m1 = logits_mV.gather(-1, targets_m1)
    p_mV = torch.softmax(logits_mV, -1, out=logits_mV)
    # The likeliest token's −log p plus how far the target lies below it: nothing underflows.
    total += (top_m1 - at_target_m1 - p_mV.gather(-1, likeliest_m1).log()).sum()
    p_mV.scatter_add_(-1, targets_m1, torch.full_like(top_m1, -1.0)).mul_(scale)
