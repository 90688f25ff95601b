"""Echo: look for the newest token in the past, and read what came after it.

Olsson et al., 2022, arXiv:2209.11895 (smeared keys); here keys are wholly of the token before

attnlm train --attention echo
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Echo(nn.Module):
    """Map (B, T, C) → (B, T, C). Keys are of the token `shift` places before; values are not."""

    def __init__(self, embed_dim: int, heads: int, shift: int = 1) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.query = nn.Linear(embed_dim, embed_dim, bias=False)
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value = nn.Linear(embed_dim, embed_dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Split the features into heads: (B, T, C) → (B, H, T, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, self.shift, 0))[:, : x.size(1)]
        reads = self.query(x), self.key(before), self.value(x)
        query, key, value = (self.split(y) for y in reads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)
