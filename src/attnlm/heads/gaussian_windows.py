"""Gaussian windows: each head prefers near tokens, in a bell-shaped window of a learned width.

Guo et al., 2019, doi:10.1609/aaai.v33i01.33016489; there one window, here one for each head

attnlm train --scores gaussian-windows --positions none
"""

import torch
from torch import Tensor, nn


class GaussianWindows(nn.Module):
    """Map queries and keys (B, H, T, D) to scores (B, H, T, T)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_narrowness = nn.Parameter(torch.full((heads, 1, 1), -2.0))
        self.log_offset = nn.Parameter(torch.full((heads, 1, 1), -2.0))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        place = torch.arange(key.size(2), device=key.device)
        squares = (place[:, None] - place) ** 2  # of distances
        prior = (self.log_narrowness.exp() * squares - self.log_offset.exp()).abs()
        return query @ key.mT / query.size(-1) ** 0.5 - prior
