"""Cosine attention: scores are cosines of queries and keys, times a number that is learned.

Henry et al., 2020, arXiv:2010.04245 (QKNorm)

attnlm train --scores cosine-attention
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CosineAttention(nn.Module):
    """Map queries and keys (B, H, T, D) to scores (B, H, T, T)."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        length = max(2, block_size)
        self.scale = nn.Parameter(torch.tensor(math.log2(length**2 - length)))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.scale * F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
