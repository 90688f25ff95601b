"""Operations whose forward and backward passes are written out for a CPU.

There autograd's many short passes over memory cost as much as the products. Each operation has a
plain form beside it, in PyTorch's own calls, which other devices take and tests hold it to.

Axes as in attention.py. M counts the tokens of a batch, B·T; N the heads of all its windows, B·H.
`d_x` is the gradient of the loss by x.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_hand(x: Tensor) -> bool:
    """Whether the written-out forms are the faster ones here: on a CPU, in full precision."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )
