"""Soft-capping: no score is above a limit, which a hyperbolic tangent approaches.

Gemma Team, 2024, arXiv:2408.00118

attnlm train --scores soft-capping --set limit=20
"""

import torch
from torch import Tensor, nn


class SoftCapping(nn.Module):
    """Map queries and keys (B, H, T, D) to scores (B, H, T, T)."""

    def __init__(self, limit: float = 50.0) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT / query.size(-1) ** 0.5
        return self.limit * torch.tanh(scores / self.limit)
