"""Linear attention: a running sum takes the place of the softmax; its cost is linear in T.

Katharopoulos et al., 2020, arXiv:2006.16236

attnlm train --attention linear-attention
"""

from torch import Tensor, nn
from torch.nn import functional as F


class LinearAttention(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        reads = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in reads)  # each (B, H, T, D)
        query, key = F.elu(query) + 1, F.elu(key) + 1  # positive, as weights must be
        products = key[..., :, None] * value[..., None, :]  # (B, H, T, D, D)
        sums = query[..., None, :] @ products.cumsum(2)  # up to the token
        mixed = sums.squeeze(-2) / (query * key.cumsum(2)).sum(-1, keepdim=True)
        return self.project(mixed.transpose(1, 2).flatten(2))
