"""Token shift: queries, keys and values read a mixture of the token and the one before it.

Peng et al., 2023, arXiv:2305.13048 (RWKV); here with softmax attention

attnlm train --attention token-shift
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TokenShift(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.share = nn.Parameter(torch.full((3, embed_dim), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        inputs = (share * x + (1 - share) * before for share in self.share)
        reads = (f(y) for f, y in zip((self.query, self.key, self.value), inputs, strict=True))
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in reads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))
