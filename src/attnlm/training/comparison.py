"""Comparison of a faster way to compute gradients with the modules of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnlm.model.inspection import agree
from attnlm.model.language_model import Transformer


def computes_gradients(
    model: Transformer, compute: Callable[[Transformer, Tensor, Tensor], object]
) -> bool:
    """Return True if `compute` adds the gradients to a model that its modules have.

    The modules of a model may have been changed from outside. Both are computed for one window of
    tokens, (1, T), in a copy of the model with random weights and without dropout. The initial
    weights would hide differences, since the head is zero at first.
    """
    trial = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    for module in trial.modules():
        for parameter in module.parameters(recurse=False):
            is_map = parameter.dim() > 1 and not isinstance(module, nn.Embedding)
            std = parameter.size(-1) ** -0.5 if is_map else 1.0
            nn.init.normal_(parameter, std=std, generator=generator)
    shape = 2, 1, model.block_size
    inputs_BT, targets_BT = torch.randint(model.vocab_size, shape, generator=generator)
    trial.zero_grad()
    with torch.enable_grad():
        trial.loss(inputs_BT, targets_BT).backward()
    expected = _gradients(trial)
    for parameter in trial.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.enable_grad():
        compute(trial, inputs_BT, targets_BT)
    return agree(_gradients(trial), expected)


def _gradients(model: Transformer) -> Tensor:
    """Return the gradients of all parameters as one vector."""
    tensors = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    return torch.cat([tensor.flatten() for tensor in tensors])
