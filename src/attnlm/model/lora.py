"""Low-rank adapters (LoRA; Hu et al., 2021): added to a model, and merged into its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from attnlm.model.layers import Linear
from attnlm.model.linear_maps import LoRA, map_path


def add_adapters(model: nn.Module, lora: LoRA) -> None:
    """Freeze a model's weights and add adapters, initialised from torch's random state."""
    model.requires_grad_(False)
    for layer in range(model.architecture.layers):  # type: ignore[arg-type, union-attr]
        for name in lora.on:
            adapted = model.get_submodule(map_path(layer, name))
            assert isinstance(adapted, Linear)
            adapted.add_adapter(lora.rank, lora.scale)


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are not trained; a model without adapters has none."""
    return {name: p.data for name, p in model.named_parameters() if not p.requires_grad}


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + scale · B A. The sum is computed in float64 and rounded once, so that the order of
    its terms does not change the result."""
    where = torch.device("cpu") if weight.is_mps else weight.device  # Apple's GPUs lack float64
    precise, down, up = (t.to(where, torch.float64) for t in (weight, down, up))
    return (precise + scale * (up @ down)).to(weight)


def merge_lora(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: LoRA) -> None:
    """Add adapters to a model's weights, in place; the keys of both are parameter names."""
    for name, down in adapters.items():
        path, _, kind = name.rpartition(".")
        if kind == "lora_down":
            weight = weights[f"{path}.weight"]
            up = adapters[f"{path}.lora_up"]
            weight.copy_(merged_weight(weight, down, up, lora.scale))


@contextlib.contextmanager
def merged_lora(model: nn.Module) -> Iterator[None]:
    """Add the adapters to the weights; on leaving the context, restore weights and adapters."""
    before = [
        (m, m.weight.data, m.lora_down, m.lora_up)
        for m in model.modules()
        if isinstance(m, Linear) and m.lora_down is not None and m.lora_up is not None
    ]
    try:
        for m, weight, down, up in before:
            m.weight.data = merged_weight(weight, down.data, up.data, m.lora_scale)
            m.lora_down = m.lora_up = None
        yield
    finally:
        for m, weight, down, up in before:
            m.weight.data, m.lora_down, m.lora_up = weight, down, up
