"""A causal convolution in place of attention: weights depend on distances alone.

Van den Oord et al., 2016, arXiv:1609.03499 (WaveNet)

attnlm train --attention causal-convolution --set size=8
"""

from torch import Tensor, nn
from torch.nn import functional as F


class CausalConvolution(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int, size: int = 4) -> None:
        super().__init__()
        self.size = size
        self.convolution = nn.Conv1d(embed_dim, embed_dim, size)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.mT, (self.size - 1, 0))  # on the left, so that no token sees a later one
        return self.convolution(padded).mT
