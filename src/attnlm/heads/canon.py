"""Canon: before attention, each feature adds a weighted sum of its own last four values.

Allen-Zhu, 2025, Physics of Language Models 4.1 (Canon-A)

attnlm train --attention canon
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Canon(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.convolution = nn.Conv1d(embed_dim, embed_dim, 4, groups=embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.convolution(F.pad(x.mT, (3, 0))).mT
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))
