"""The MLP of a block. Axes as in attention.py; F is the number of hidden units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from attnlm.model.layers import Linear

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture


class MLP(nn.Module):
    """An MLP, down(f(up(x))), where f is GELU in GPT-2's tanh approximation,
    or ReLU² (So et al., 2021).

    With SwiGLU (Shazeer, 2020), the MLP is down(silu(gate(x)) · up(x)).
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.kind = a.mlp
        std = a.width**-0.5
        down = Linear(a.mlp_dim, a.width, bias=a.bias)
        self.gate = Linear(a.width, a.mlp_dim, bias=a.bias, std=std) if a.mlp == "swiglu" else None
        self.up = Linear(a.width, a.mlp_dim, bias=a.bias, std=std)
        self.down = down
        if a.residual:
            for parameter in self.down.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map (B, T, C) → (B, T, C)."""
        if self.gate is not None:
            hidden_BTF = F.silu(self.gate(x_BTC)) * self.up(x_BTC)
        elif self.kind == "gelu":
            hidden_BTF = F.gelu(self.up(x_BTC), approximate="tanh")
        else:
            hidden_BTF = F.relu(self.up(x_BTC)).square()
        down: Tensor = self.down(hidden_BTF)
        return down
