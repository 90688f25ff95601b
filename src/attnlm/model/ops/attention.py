"""Attention as the textbook has it, with everything on the way at hand."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_heads(heads: int, *kv: Tensor) -> tuple[Tensor, ...]:
    """Keys or values of K heads, (B, K, S, D), repeated for the H heads of queries they serve."""
    return tuple(
        x if x.size(-3) == heads else x.repeat_interleave(heads // x.size(-3), dim=-3) for x in kv
    )


def scores_and_weights(
    query: Tensor, key: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """scale · q kᵀ, and the softmax of what its mask leaves: (..., T, S) both.

    `scale` is 1/√D by default. Causal, a query sees the keys up to its own; the last query belongs
    to the last key.
    """
    new, total = query.size(-2), key.size(-2)
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    if not causal:
        return scores, torch.softmax(scores, -1)
    later = torch.ones(new, total, dtype=torch.bool, device=query.device).triu(total - new + 1)
    return scores, torch.softmax(scores.masked_fill(later, -torch.inf), -1)
