"""Linear maps, which may have low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnlm.model.ops.linear import joined_linear, linear


class Linear(nn.Linear):
    """x Wᵀ + b. With an adapter (Hu et al., 2021), (W + scale · B A) in place of W."""

    lora_down: nn.Parameter | None
    lora_up: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_parameter("lora_down", None)
        self.register_parameter("lora_up", None)
        self.lora_scale = 0.0

    def adapt(self, rank: int, scale: float) -> None:
        """Gives it an adapter that changes nothing yet: A uniform as in PEFT, B zero."""
        down = torch.empty(rank, self.in_features, device=self.weight.device)
        self.lora_down = nn.Parameter(down.uniform_(-1, 1).mul_(self.in_features**-0.5))
        self.lora_up = nn.Parameter(self.weight.new_zeros(self.out_features, rank))
        self.lora_scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) → (..., outputs)."""
        if self.weight.requires_grad:
            return linear(x, self.weight, self.bias)
        return joined_linear(x, [self])


class _Undrawn(Linear):
    """One that draws nothing before it is given its weights.

    `nn.utils.skip_init` would do, but it imports sympy, half a second long.
    """

    def reset_parameters(self) -> None:
        pass

    def _get_name(self) -> str:
        return Linear.__name__


def drawn_linear(inputs: int, outputs: int, *, bias: bool, std: float) -> Linear:
    """A linear map whose weights begin as N(0, std²), its biases at 0."""
    layer = _Undrawn(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
