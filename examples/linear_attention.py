"""Linear attention (Katharopoulos et al., 2020): a running sum takes the place of softmax.

attnlm check examples/linear_attention.py:LinearAttention --heads 4
attnlm train --attention examples/linear_attention.py:LinearAttention --heads 4
"""

from torch import Tensor, nn
from torch.nn import functional as F


class LinearAttention(nn.Module):
    """Map (B, T, C) → (B, T, C). Its cost is linear in T, and it has no attention maps."""

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(embed_dim, embed_dim, bias=False)
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value = nn.Linear(embed_dim, embed_dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Split the features into heads: (B, T, C) → (B, H, T, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(f(x)) for f in (self.query, self.key, self.value))
        query, key = F.elu(query) + 1, F.elu(key) + 1  # positive, as weights must be
        products = key[..., :, None] * value[..., None, :]  # (B, H, T, D, D)
        mixed = query[..., None, :] @ products.cumsum(2)  # the sum goes no further than the token
        total = (query * key.cumsum(2)).sum(-1, keepdim=True)  # of the weights
        return (mixed.squeeze(-2) / total).transpose(1, 2).flatten(2)
