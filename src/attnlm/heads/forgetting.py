"""Forgetting attention: each token decides how much of the tokens before it a head forgets.

Lin et al., 2025, arXiv:2503.02130

attnlm train --attention forgetting
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Forgetting(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.forget = nn.Linear(embed_dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        kept = F.logsigmoid(self.forget(x)).mT.cumsum(-1)  # (B, H, T), since the first token
        scores = query @ key.mT / query.size(-1) ** 0.5 + kept[..., None] - kept[..., None, :]
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self.project(mixed.transpose(1, 2).flatten(2))
