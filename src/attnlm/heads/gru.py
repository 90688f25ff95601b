"""A gated recurrent unit in place of attention: all of the past stands in one state.

Cho et al., 2014, arXiv:1406.1078

attnlm train --attention gru
"""

from torch import Tensor, nn


class Gru(nn.Module):
    """Map (B, T, C) → (B, T, C)."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.gru = nn.GRU(embed_dim, embed_dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        return states
