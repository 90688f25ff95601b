"""T5's bias: each head learns what to add to the scores of each distance, of far ones in groups.

Raffel et al., 2020, arXiv:1910.10683; there all layers share the biases, here each has its own

attnlm train --scores t5-bias --positions none
"""

import math

import torch
from torch import Tensor, nn


class T5Bias(nn.Module):
    """Map queries and keys (B, H, T, D) to scores (B, H, T, T)."""

    def __init__(self, heads: int, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.exact, self.farthest = buckets // 2, farthest
        self.bias = nn.Parameter(torch.zeros(buckets, heads))

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the number of each distance's bias: half are exact, the others logarithmic."""
        growth = (distance.clamp(min=1) / self.exact).log() / math.log(self.farthest / self.exact)
        far = self.exact + (growth * self.exact).long().clamp(max=self.exact - 1)
        return torch.where(distance < self.exact, distance, far)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        place = torch.arange(key.size(2), device=key.device)
        distance = (place[:, None] - place).clamp(min=0)  # later keys are masked
        bias = self.bias[self.bucket(distance)].permute(2, 0, 1)  # (H, T, T)
        return query @ key.mT / query.size(-1) ** 0.5 + bias
