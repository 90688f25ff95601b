"""Parameters, operations and rotary angles of an architecture, computed without loading torch.

A matmul of (M, K) and (K, N) takes 2·M·K·N floating-point operations (FLOPs). Only matmuls count,
as in PyTorch's FLOP counter. Attention counts in full, including the scores that are masked.

Running a model on PyTorch's meta device gives the same FLOPs (tests/model/test_costs.py), but
its first use imports PyTorch's compiler, which takes a second: a third of a whole default run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from attnlm.model.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a model, per token of a window of block_size unless a field says more."""

    layers: int
    width: int
    """features of the embeddings; 0 for a model without blocks, which is only a table of logits"""
    lm_head_inputs: int
    """inputs of the LM head"""
    multiplied_weights: int
    """weights in the matmuls of one token, in blocks and LM head"""
    mixing_flops: int
    """operations of one layer's attention, forward"""
    mixing_gradient_flops: int
    """operations of the gradient of one layer's attention"""
    kept_features: int
    """numbers that one block keeps for the backward pass"""
    cached: int
    """numbers in the caches of keys and values of one layer; 0 for a model without caches"""
    peak_activations: int
    """numbers that one block holds at the peak of its memory"""

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of the forward pass."""
        return 2 * self.multiplied_weights + self.layers * self.mixing_flops

    @property
    def training_flops(self) -> int:
        """Return the FLOPs of the forward and backward pass, without the optimizer's update.

        The backward pass of a matmul takes two matmuls, one for each factor's gradient.
        """
        mixing = self.layers * (self.mixing_flops + self.mixing_gradient_flops)
        return 6 * self.multiplied_weights + mixing


def parameter_shapes(a: Architecture, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of an architecture by its name."""
    if a.embed_dim is None:
        return {"table.weight": (vocab_size, vocab_size)}
    width = a.width
    block: dict[str, tuple[int, ...]] = {}

    def add(name: str, outputs: int, inputs: int, bias: bool = a.bias) -> None:
        block[f"{name}.weight"] = outputs, inputs
        if bias:
            block[f"{name}.bias"] = (outputs,)

    if a.attention == "softmax":
        heads = a.heads * a.head_dim
        kv_heads = a.num_kv_heads * a.head_dim
        add("attention.query", heads, width, a.qkv_bias)
        add("attention.key", kv_heads, width, a.qkv_bias)
        add("attention.value", kv_heads, width, a.qkv_bias)
        if a.projection:
            add("attention.projection", width, heads)
    if a.mlp == "swiglu":
        add("mlp.gate", a.mlp_dim, width)
    if a.mlp != "none":
        add("mlp.up", a.mlp_dim, width)
        add("mlp.down", width, a.mlp_dim)
    if a.query_key_norm:
        block |= dict.fromkeys(
            ("attention.query_norm.gain", "attention.key_norm.gain"), (a.head_dim,)
        )
    kinds = {"none": (), "rms": ("gain",)}.get(a.norm, ("gain", "bias") if a.bias else ("gain",))
    for kind in kinds:
        block |= {f"attention_norm.{kind}": (width,)} if a.attention != "none" else {}
        block |= {f"mlp_norm.{kind}": (width,)} if a.mlp != "none" else {}
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (vocab_size, width)}
    if a.positions == "learned":
        shapes["position_embedding.weight"] = (a.block_size, width)
    shapes |= {f"norm.{kind}": (a.lm_head_inputs,) for kind in kinds}
    shapes |= {
        f"blocks.{layer}.{name}": shape
        for layer in range(a.layers)
        for name, shape in block.items()
    }
    shapes |= {} if a.tie_embeddings else {"head.weight": (vocab_size, a.lm_head_inputs)}
    return shapes | ({"head.bias": (vocab_size,)} if a.head_bias else {})


def compute_costs(a: Architecture, vocab_size: int) -> Costs:
    """Return the costs of an architecture."""
    matrices = (
        shape
        for name, shape in parameter_shapes(a, vocab_size).items()
        if name.startswith("blocks.") and len(shape) == 2
    )
    is_softmax = a.attention == "softmax"
    mixed = a.heads * a.head_dim if is_softmax else a.maps_per_layer * a.lm_head_inputs
    mixing = 4 * a.block_size * mixed  # q kᵀ, and softmax(q kᵀ) v
    # The scores of uniform attention are constant, so that only its values need a gradient.
    gradient = 2 * a.block_size * mixed if a.attention == "uniform" else 2 * mixing
    maps = a.maps_per_layer * a.block_size if a.materializes_attention else 0
    return Costs(
        layers=a.layers,
        width=a.width,
        lm_head_inputs=a.lm_head_inputs,
        multiplied_weights=vocab_size * a.lm_head_inputs + sum(map(math.prod, matrices)),
        mixing_flops=mixing,
        mixing_gradient_flops=gradient,
        cached=2 * max(a.width, a.num_kv_heads * a.head_dim) if a.maps_per_layer else 0,
        kept_features=(5 if a.residual else 1) * a.width
        + (5 if is_softmax else 2) * mixed
        + 3 * a.mlp_dim
        + 3 * maps,
        peak_activations=2 * a.width + max(3 * a.mlp_dim, 4 * mixed + 2 * maps),
    )


def rotary_angles(a: Architecture) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cosines and sines (T, D / 2) of rotary positions (Su et al., 2021).

    `rotary_factor` divides frequencies (Chen et al., 2023). If `rotary_context` is also set, as in
    Llama 3.1, the frequency of a pair that turns 4 times or more within so many positions is not
    divided, and the frequency of a pair that turns 1 to 4 times is divided in part.
    """
    import numpy as np

    frequencies = a.rotary_base ** (-np.arange(0, a.head_dim, 2, dtype=np.float64) / a.head_dim)
    if a.rotary_factor is not None:
        turns = frequencies * (a.rotary_context or 0) / (2 * np.pi)
        kept = ((turns - 1) / 3).clip(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / a.rotary_factor)
    angles = np.outer(np.arange(a.block_size), frequencies)
    return np.cos(angles), np.sin(angles)
