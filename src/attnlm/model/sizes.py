"""Sizes of an architecture, computed without loading torch: matrices, adapters, FLOPs.

A matmul of (M, K) and (K, N) takes 2·M·K·N floating-point operations (FLOPs). Only matmuls count,
as in PyTorch's FLOP counter. Attention counts in full, including the scores that are masked.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnlm.model.architecture import Architecture

Shape = tuple[int, int]

_PLACES = {
    **dict.fromkeys(("query", "key", "value", "projection"), "attention"),
    **dict.fromkeys(("gate", "up", "down"), "mlp"),
}
MAP_NAMES = tuple(_PLACES)
"""The linear maps of a block, in the order of computation."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al., 2021) of the linear maps named in `on`.

    In each block, such a map multiplies by W + alpha/rank · B A. A (`lora_down`) has shape
    (rank, inputs), and B (`lora_up`) has shape (outputs, rank).
    """

    rank: int
    alpha: float
    on: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Return the factor that multiplies B A."""
        return self.alpha / self.rank


def map_shapes(a: Architecture) -> dict[str, Shape]:
    """Return the shape (outputs, inputs) of each linear map of a block."""
    width, shapes = a.width, dict[str, Shape]()
    if a.attention == "softmax":
        heads, kv_heads = a.heads * a.head_dim, a.num_kv_heads * a.head_dim
        shapes |= {"query": (heads, width), "key": (kv_heads, width), "value": (kv_heads, width)}
        shapes |= {"projection": (width, heads)} if a.projection else {}
    if a.mlp != "none":
        shapes |= {"gate": (a.mlp_dim, width)} if a.mlp == "swiglu" else {}
        shapes |= {"up": (a.mlp_dim, width), "down": (width, a.mlp_dim)}
    return shapes


def map_path(layer: int, name: str) -> str:
    """Return the path of a map's module, such as `blocks.0.attention.query`."""
    return f"blocks.{layer}.{_PLACES[name]}.{name}"


def map_name(path: str) -> str:
    """Return the name of the map that has this path."""
    return path.rpartition(".")[2]


def weight_shapes(a: Architecture, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name, as the settings of the model say.

    A model whose classes were replaced may have other parameters.
    """
    if a.embed_dim is None:
        return {"table.weight": (vocab_size, vocab_size)}
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (vocab_size, a.width)}
    if a.positions == "learned":
        shapes["position_embedding.weight"] = a.block_size, a.width
    norms = {"norm": a.body_dim}
    for layer in range(a.layers):
        for name, shape in map_shapes(a).items():
            path = map_path(layer, name)
            shapes[f"{path}.weight"] = shape
            if a.qkv_bias if name in ("query", "key", "value") else a.bias:
                shapes[f"{path}.bias"] = shape[:1]
        if a.attention == "softmax" and a.query_key_norm:
            path = f"blocks.{layer}.attention"
            shapes |= dict.fromkeys(
                (f"{path}.query_norm.gain", f"{path}.key_norm.gain"), (a.head_dim,)
            )
        norms |= {f"blocks.{layer}.attention_norm": a.width} if a.attention != "none" else {}
        norms |= {f"blocks.{layer}.mlp_norm": a.width} if a.mlp != "none" else {}
    if a.norm != "none":
        shapes |= {f"{path}.gain": (size,) for path, size in norms.items()}
    if a.norm == "layer" and a.bias:
        shapes |= {f"{path}.bias": (size,) for path, size in norms.items()}
    shapes |= {} if a.tie_embeddings else {"head.weight": (vocab_size, a.body_dim)}
    return shapes | ({"head.bias": (vocab_size,)} if a.head_bias else {})


def adapter_shapes(a: Architecture, lora: LoRA) -> dict[str, Shape]:
    """Return the shapes of the adapters' parameters by their names in the model."""
    shapes = map_shapes(a)
    named: dict[str, Shape] = {}
    for layer in range(a.layers):
        for name in lora.on:
            outputs, inputs = shapes[name]
            named[f"{map_path(layer, name)}.lora_down"] = lora.rank, inputs
            named[f"{map_path(layer, name)}.lora_up"] = outputs, lora.rank
    return named


def adapter_numbers(a: Architecture, lora: LoRA) -> int:
    """Return the number of parameters of the adapters; only these are trained."""
    return sum(rows * columns for rows, columns in adapter_shapes(a, lora).values())


def block_matrices(a: Architecture) -> int:
    """Return the number of weights in the matrices of one block."""
    return sum(rows * columns for rows, columns in map_shapes(a).values())


def multiplied_weights(a: Architecture, vocab_size: int) -> int:
    """Return the number of weights in the matmuls of one token, in all blocks and the LM head."""
    return vocab_size * a.body_dim + a.layers * block_matrices(a)


def mixed_width(a: Architecture) -> int:
    """Return how many features per token a layer's attention mixes; 0 without attention."""
    return a.heads * a.head_dim if a.attention == "softmax" else a.maps_per_layer * a.body_dim


def forward_flops(a: Architecture, vocab_size: int) -> int:
    """Return the FLOPs of one token's forward pass in a window of block_size."""
    mixing = 4 * a.block_size * mixed_width(a)  # q kᵀ, and the weights' product with v
    return 2 * multiplied_weights(a, vocab_size) + a.layers * mixing


def training_flops(a: Architecture, vocab_size: int, lora: LoRA | None = None) -> int:
    """Return the FLOPs of one token's forward and backward pass, without the optimizer's update.

    The backward pass of a matmul takes two matmuls, one for each factor's gradient. The scores of
    uniform attention are constant, so that only its values need a gradient. If adapters are
    trained, the model's own weights are frozen and need no gradient.
    """
    flops = 3 * forward_flops(a, vocab_size)
    if a.attention == "uniform":
        flops -= a.layers * 6 * a.block_size * mixed_width(a)
    if lora is not None:
        flops -= 2 * multiplied_weights(a, vocab_size)
        flops += 6 * adapter_numbers(a, lora)
    return flops
