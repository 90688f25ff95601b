"""Differential attention: a second map of each head is subtracted from the first, as noise.

Ye et al., 2024, arXiv:2410.05258

attnlm train --attention differential-attention
"""

import math

import torch
from torch import Tensor, nn


class DifferentialAttention(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.first = heads, 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.factors = nn.Parameter(0.1 * torch.randn(2, 2, embed_dim // heads // 2))
        self.norm = nn.RMSNorm(embed_dim // heads, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (f(x).unflatten(-1, (self.heads, 2, -1)) for f in (self.query, self.key))
        value = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, 2D)
        scores = torch.einsum("bqhmd,bkhmd->mbhqk", query, key) / query.size(-1) ** 0.5
        later = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1)
        signal, noise = scores.masked_fill(later, -torch.inf).softmax(-1)
        one, other = (a.dot(b).exp() for a, b in self.factors)
        mixed = (signal - (one - other + self.first) * noise) @ value
        mixed = (1 - self.first) * self.norm(mixed)
        return self.project(mixed.transpose(1, 2).flatten(2))
