"""How much memory a training run takes, told before it takes it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from attnlm.base.errors import AttnlmError
from attnlm.compute.device import Device
from attnlm.config.settings import Config
from attnlm.model.attention import SHORT

FACTOR = 2.0
"""By how much what is measured may differ from the estimate, either way."""

_FLOAT = 4
# Weights, gradient and two moments stay; a checkpoint is built in memory before it is written.
_FLOATS_PER_PARAMETER = 4 + 4
# Whatever the run: the batches drawn ahead, the validation split's windows, kernels' own memory.
_ALWAYS = 2**25


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device that trains, beside PyTorch itself."""

    parameters: int
    """Weights, gradients, the optimizer's state, and the checkpoint on its way to the disk."""
    activations: int
    """What a step computes from its batch."""

    @property
    def total(self) -> int:
        return self.parameters + self.activations + _ALWAYS


def estimate_memory(config: Config, vocab_size: int, parameters: int) -> MemoryEstimate:
    """From the sizes alone, for a run in float32; lower precision takes less."""
    tokens = config.training.batch_size * config.model.block_size
    # Logits, their softmax and its gradient.
    floats = tokens * (3 * vocab_size + _floats_per_token(config))
    return MemoryEstimate(_FLOATS_PER_PARAMETER * _FLOAT * parameters, _FLOAT * floats)


def _floats_per_token(config: Config) -> int:
    """Of the body's activations, kept for the way back or alive at its widest place."""
    a = config.model
    if a.embed_dim is None:
        return 0
    width, length = a.embed_dim, a.block_size
    heads = a.heads * a.head_dim
    # Long contexts without dropout on the weights go through a kernel that keeps no scores.
    has_dropout = bool(a.dropout) and not a.residual
    keeps_scores = length <= SHORT or has_dropout or a.attention != "softmax"
    scores = a.maps_per_layer * length * (2 + 2 * has_dropout) if keeps_scores else 0
    # Queries, keys and values before and after rotation; what an MLP multiplies.
    mixed = 8 * heads if a.attention == "softmax" else 2 * width
    norms = 4 * width if a.norm != "none" else 0
    mlp = {"none": 0, "swiglu": 5, "gelu": 3, "relu2": 4}[a.mlp] * a.mlp_dim
    per_block = 2 * width + mixed + scores + norms + mlp
    return 4 * width + a.layers * per_block


def check_memory(config: Config, vocab_size: int, parameters: int, device: Device) -> None:
    """Raises AttnlmError where the run clearly can't fit: by more than the estimate may be off."""
    estimate, there = estimate_memory(config, vocab_size, parameters), _memory_of(device)
    if there is None or estimate.total <= FACTOR * there:
        return
    if estimate.activations > estimate.parameters:
        hint = "lower `batch_size` or `block_size`"
    elif config.model.embed_dim is None:
        hint = "prepare the text with fewer ids, such as tokenizer bpe:1024"
    else:
        hint = "lower `embed_dim`, `heads` or `layers`"
    raise AttnlmError(
        f"this run takes about {shown(estimate.total)} of memory, and {device.name} has "
        f"{shown(there)}",
        hint,
    )


def shown(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"


def _memory_of(device: Device) -> int | None:
    """Bytes that the device has in all, where it tells."""
    if device.name == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
