"""Sinks: part of each head's attention may go nowhere, as far as a learned score wins.

OpenAI, 2025, arXiv:2508.10925 (gpt-oss); Xiao et al., 2023, arXiv:2309.17453

attnlm train --attention sinks
"""

import torch
from torch import Tensor, nn


class Sinks(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.sink = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        scores = query @ key.mT / query.size(-1) ** 0.5
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        # As a softmax over one more score, the sink's, whose weight is left out.
        share = (scores.logsumexp(-1, keepdim=True) - self.sink).sigmoid()
        mixed = share * (scores.softmax(-1) @ value)
        return self.project(mixed.transpose(1, 2).flatten(2))
