"""How large a model is, from its architecture alone: its matrices, and the products with them.

Of a product of (M, K) and (K, N) there are 2·M·K·N floating-point operations (FLOPs). Only products
count, as in PyTorch's own counter; attention counts whole, with what its mask leaves out.
"""

from __future__ import annotations

from attnlm.model.architecture import Architecture
from attnlm.model.low_rank import LoRA, adapter_numbers, map_shapes


def block_shapes(a: Architecture) -> list[tuple[int, int]]:
    """Outputs and inputs of the matrices of one block."""
    return list(map_shapes(a).values())


def block_matrices(a: Architecture) -> int:
    """Numbers in the matrices of one block."""
    return sum(rows * columns for rows, columns in block_shapes(a))


def multiplied_weights(a: Architecture, vocab_size: int) -> int:
    """Numbers in the matrices that a token is multiplied by: those of all blocks, and the head."""
    return vocab_size * a.body_dim + a.layers * block_matrices(a)


def mixed_width(a: Architecture) -> int:
    """How many features of a token attention mixes, in all heads together: 0 without attention."""
    return a.heads * a.head_dim if a.attention == "softmax" else a.maps_per_layer * a.body_dim


def forward_flops(a: Architecture, vocab_size: int) -> int:
    """FLOPs of one token's forward pass, in a window of block_size."""
    mixing = 4 * a.block_size * mixed_width(a)  # q kᵀ, and the weights' product with v
    return 2 * multiplied_weights(a, vocab_size) + a.layers * mixing


def training_flops(a: Architecture, vocab_size: int, lora: LoRA | None = None) -> int:
    """FLOPs of one token's forward and backward pass, without the optimizer's update.

    A product takes two on the way back, one by each factor; weights that are all equal take none.
    Beside adapters, the model's own weights take none either.
    """
    flops = 3 * forward_flops(a, vocab_size)
    if a.attention == "uniform":
        flops -= a.layers * 6 * a.block_size * mixed_width(a)
    if lora is not None:
        flops -= 2 * multiplied_weights(a, vocab_size)
        flops += 6 * adapter_numbers(a, lora)
    return flops
