"""Parameters and operations of an architecture, computed without loading torch.

A matmul of (M, K) and (K, N) takes 2·M·K·N floating-point operations (FLOPs). Only matmuls count,
as in PyTorch's FLOP counter. Attention counts in full, including the scores that are masked.

Running a model on PyTorch's meta device gives the same FLOPs (tests/workflows/test_plan.py), but
its first use imports PyTorch's compiler, which takes a second: a third of a whole default run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlm.model.linear_maps import LoRA, Shape, map_path, map_shapes

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a model, per token of a window of block_size unless a field says more."""

    vocab_size: int
    layers: int
    width: int
    """features of the embeddings; 0 for a model without blocks, which is only a table of logits"""
    lm_head_inputs: int
    """inputs of the LM head"""
    matrices: dict[str, Shape]
    """the linear maps of one block, as (outputs, inputs)"""
    mixing_flops: int
    """operations of one layer's attention, forward"""
    mixing_gradient_flops: int
    """operations of the gradient of one layer's attention"""
    kept_features: int
    """numbers that one block keeps for the backward pass in float32, as residual streams are"""
    kept_inputs: int
    """numbers that one block keeps as inputs of matmuls, in the precision of the matmuls"""
    cached: int
    """numbers in the caches of keys and values of one layer; 0 for a model without caches"""
    peak_activations: int
    """numbers that one block holds at the peak of its memory"""

    @property
    def block_matrices(self) -> int:
        """Return the number of weights in the matrices of one block."""
        return sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def multiplied_weights(self) -> int:
        """Return the number of weights in the matmuls of one token, in blocks and LM head."""
        return self.vocab_size * self.lm_head_inputs + self.layers * self.block_matrices

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of the forward pass."""
        return 2 * self.multiplied_weights + self.layers * self.mixing_flops

    def training_flops(self, lora: LoRA | None = None) -> int:
        """Return the FLOPs of the forward and backward pass, without the optimizer's update.

        The backward pass of a matmul takes two matmuls, one for each factor's gradient. If adapters
        are trained, the model's own weights are frozen and need no gradient.
        """
        flops = 6 * self.multiplied_weights
        flops += self.layers * (self.mixing_flops + self.mixing_gradient_flops)
        if lora is not None:
            flops += 6 * self.adapter_numbers(lora) - 2 * self.multiplied_weights
        return flops

    def adapter_shapes(self, lora: LoRA) -> dict[str, Shape]:
        """Return the shapes of the adapters' parameters by their names in the model."""
        named: dict[str, Shape] = {}
        for layer in range(self.layers):
            for name in lora.on:
                outputs, inputs = self.matrices[name]
                named[f"{map_path(layer, name)}.lora_down"] = lora.rank, inputs
                named[f"{map_path(layer, name)}.lora_up"] = outputs, lora.rank
        return named

    def adapter_numbers(self, lora: LoRA) -> int:
        """Return the number of parameters of the adapters; only these are trained."""
        return sum(rows * columns for rows, columns in self.adapter_shapes(lora).values())


def compute_costs(a: Architecture, vocab_size: int) -> Costs:
    """Return the costs of an architecture."""
    is_softmax = a.attention == "softmax"
    mixed = a.heads * a.head_dim if is_softmax else a.maps_per_layer * a.lm_head_inputs
    mixing = 4 * a.block_size * mixed  # q kᵀ, and softmax(q kᵀ) v
    # The scores of uniform attention are constant, so that only its values need a gradient.
    gradient = 2 * a.block_size * mixed if a.attention == "uniform" else 2 * mixing
    maps = a.maps_per_layer * a.block_size if a.materializes_attention else 0
    return Costs(
        vocab_size=vocab_size,
        layers=a.layers,
        width=a.width,
        lm_head_inputs=a.lm_head_inputs,
        matrices=map_shapes(a),
        mixing_flops=mixing,
        mixing_gradient_flops=gradient,
        cached=2 * max(a.width, a.num_kv_heads * a.head_dim) if a.maps_per_layer else 0,
        kept_features=(5 if a.residual else 1) * a.width,
        kept_inputs=(6 if is_softmax else 2) * mixed + 3 * a.mlp_dim + 3 * maps,
        peak_activations=2 * a.width + max(3 * a.mlp_dim, 4 * mixed + 2 * maps),
    )
