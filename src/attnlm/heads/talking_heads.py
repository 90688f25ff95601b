"""Talking heads: heads mix their scores before the softmax, and their weights after it.

Shazeer et al., 2020, arXiv:2003.02436

attnlm train --attention talking-heads
"""

import torch
from torch import Tensor, nn


class TalkingHeads(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.before = nn.Parameter(torch.eye(heads))
        self.after = nn.Parameter(torch.eye(heads))

    def forward(self, x: Tensor) -> Tensor:
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        scores = query @ key.mT / query.size(-1) ** 0.5  # (B, H, T, T)
        scores = torch.einsum("bhqk,hg->bgqk", scores, self.before)
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,hg->bgqk", weights, self.after) @ value
        return self.project(mixed.transpose(1, 2).flatten(2))
