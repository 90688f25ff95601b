"""Sigmoid attention: each weight is the sigmoid of its score, so that weights do not compete.

Ramapuram et al., 2024, arXiv:2409.04431

attnlm train --attention sigmoid-attention
"""

import math

from torch import Tensor, nn


class SigmoidAttention(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int, block_size: int) -> None:
        super().__init__()
        self.heads, self.bias = heads, -math.log(block_size)
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        scores = query @ key.mT / query.size(-1) ** 0.5 + self.bias
        mixed = scores.sigmoid().tril() @ value
        return self.project(mixed.transpose(1, 2).flatten(2))
