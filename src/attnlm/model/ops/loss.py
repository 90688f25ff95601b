"""The loss of a prediction."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean loss in nats per token, computed in float32 at least."""
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())
