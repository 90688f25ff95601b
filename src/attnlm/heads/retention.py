"""Retention: rotated products fade with distance, without a softmax; a gate follows.

Sun et al., 2023, arXiv:2307.08621 (RetNet)

attnlm train --attention retention
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Retention(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.gate = nn.Linear(embed_dim, embed_dim, bias=False)
        self.norm = nn.GroupNorm(heads, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        place, half = torch.arange(T), query.size(-1) // 2
        angles = place[:, None] * 10000.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones_like(angles), angles)
        query, key = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) for y in (query, key))
        products = (query * turn @ (key * turn).mH).real / (2 * half) ** 0.5
        decay = (1 - 2.0 ** (-5 - torch.arange(self.heads)))[:, None, None]
        mixed = (products * decay ** (place[:, None] - place).clamp(min=0)).tril() @ value
        mixed = self.norm(mixed.transpose(1, 2).reshape(B * T, C)).view(B, T, C)
        return self.project(F.silu(self.gate(x)) * mixed)
