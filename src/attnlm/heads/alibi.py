"""ALiBi: each score falls with the distance of the tokens, in each head at another rate.

Press et al., 2022, arXiv:2108.12409

attnlm train --scores alibi --positions none
"""

import torch
from torch import Tensor, nn


class Alibi(nn.Module):
    """Map queries and keys (B, H, T, D) to scores (B, H, T, T)."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes.view(heads, 1, 1), persistent=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        place = torch.arange(key.size(2), device=key.device)
        distance = place[:, None] - place  # of the query in a row and the key in a column
        return query @ key.mT / query.size(-1) ** 0.5 - self.slopes * distance
