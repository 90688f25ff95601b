"""Attention in which each head learns a temperature. Below 1 it attends to fewer tokens.

attnlm check examples/temperature.py:Temperature --heads 4
attnlm train --attention examples/temperature.py:Temperature --heads 4 --set start=0.5
"""

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int, start: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(embed_dim, embed_dim, bias=False)
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value = nn.Linear(embed_dim, embed_dim, bias=False)
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), start))

    def split(self, x: Tensor) -> Tensor:
        """Split the features into heads: (B, T, C) → (B, H, T, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(f(x)) for f in (self.query, self.key, self.value))
        scores = query @ key.mT / query.size(-1) ** 0.5 / self.temperature  # (B, H, T, T)
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        return (weights @ value).transpose(1, 2).flatten(2)
