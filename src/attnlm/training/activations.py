"""How much of a batch is held in memory: for the way back, and at the widest place.

Counts are of numbers per token, in two kinds: those of the residual stream, in float32, and those
that products read and write, in the precision of the products. Tests compare them with what
autograd keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnlm.model.architecture import Architecture
from attnlm.model.low_rank import LoRA
from attnlm.model.sizes import mixed_width
from attnlm.training.one_layer import is_one_layer


class Numbers(NamedTuple):
    """So many of the residual stream, so many of products."""

    stream: int
    products: int

    def bytes(self, width: int) -> int:
        """With four bytes for each number of the stream, and `width` for each of products."""
        return 4 * self.stream + width * self.products


def kept_by_block(a: Architecture, *, compiled: bool, lora: LoRA | None = None) -> Numbers:
    """What a block keeps for the way back; `compiled` operations keep less.

    Beside adapters, the inputs of maps are kept only for those that have one.
    """
    width = a.embed_dim or 0
    norm = _norm(a, compiled)
    stream = products = 0
    if a.attention != "none":
        stream += norm
        products += width + _mixing(a, compiled)
        stream += a.maps_per_layer  # the sums of softmax
    if a.mlp != "none":
        stream += norm
        between = {"swiglu": 3 if compiled else 4}.get(a.mlp, 2)
        products += width + between * a.mlp_dim
    if a.dropout and a.residual:  # which numbers were dropped
        products += width * ((a.attention != "none") + (a.mlp != "none"))
    return Numbers(stream, products - _not_kept(a, lora))


def _not_kept(a: Architecture, lora: LoRA | None) -> int:
    """What frozen maps do not keep of their inputs, less what adapters keep between A and B."""
    if lora is None:
        return 0
    not_kept, width = 0, a.embed_dim or 0
    if a.attention == "softmax" and not {"query", "key", "value"} & set(lora.on):
        not_kept += width
    if a.mlp != "none" and not {"gate", "up"} & set(lora.on):
        not_kept += width
    if a.mlp != "none" and "down" not in lora.on:
        not_kept += a.mlp_dim
    return not_kept - lora.rank * len(lora.on)


def _mixing(a: Architecture, compiled: bool) -> int:
    """Return the numbers per token of queries, keys, values and outputs, by PyTorch's kernel."""
    mixed = mixed_width(a)
    if a.attention != "softmax":
        return mixed + (mixed if a.attention == "uniform" else 0)
    kv = a.num_kv_heads * a.head_dim
    normed, placed = a.query_key_norm, a.query_key_norm or a.positions == "rotary"
    drops_weights = bool(a.dropout) and not a.residual
    shared = kv < mixed  # keys and values are copied for each of the queries
    kept = mixed  # of the output
    if not placed or normed or compiled or not shared:
        kept += mixed + 2 * kv  # as they come out of one product
    if placed:
        kept += mixed
    kept += 2 * mixed if shared else kv * placed * (1 + compiled)
    if normed and not compiled:
        kept += 2 * mixed + kv  # before their gains, and the output in another order
    if drops_weights:
        kept += 3 * a.heads * a.block_size  # weights, which were dropped, and the rest
    return kept


def kept_outside(a: Architecture, *, compiled: bool) -> Numbers:
    """What embeddings, the last norm and the LM head keep, without the logits."""
    if a.embed_dim is None:
        return Numbers(0, 0)
    norm = _norm(a, compiled)
    dropped = a.embed_dim if a.dropout and a.residual else 0
    # Else the head reads what the attention keeps already.
    is_read = norm or a.residual or a.mlp != "none" or a.projection
    return Numbers(norm, dropped + a.body_dim * bool(is_read))


def _norm(a: Architecture, compiled: bool) -> int:
    """What a norm keeps beside its output."""
    if a.norm == "none":
        return 0
    return a.body_dim * (1 if compiled or a.norm == "layer" else 2)  # also before its gain


def widest_backward(a: Architecture) -> int:
    """Numbers per token that a block's way back takes for itself at its widest place."""
    width = a.embed_dim or 0
    between = (3 if a.mlp == "swiglu" else 2) * a.mlp_dim
    return 2 * width + max(between, 4 * mixed_width(a))


def widest_forward(a: Architecture) -> int:
    """Numbers per token at the widest place of a forward pass of which nothing is kept."""
    if a.embed_dim is None:
        return 0
    if is_one_layer(a, vocab_size=0, tokens=0):
        return one_layer_numbers(a, compiled=False, forward=True)
    between = (3 if a.mlp == "swiglu" else 2) * a.mlp_dim
    return 2 * a.embed_dim + max(between, _mixing(replace(a, dropout=0.0), compiled=True))


def joined_matrices(a: Architecture) -> int:
    """Numbers in a block's copies of weights: maps of one input are joined to one product."""
    width = a.embed_dim or 0
    maps = (a.heads + 2 * a.num_kv_heads) * a.head_dim if a.attention == "softmax" else 0
    return width * (maps + 2 * a.mlp_dim * (a.mlp == "swiglu"))


def one_layer_numbers(a: Architecture, *, compiled: bool, forward: bool = False) -> int:
    """Numbers per token that the one-layer form writes, without the logits; `forward` alone."""
    mixed = mixed_width(a)  # which it holds of queries, keys, values and outputs, and as gradients
    held = (4 if forward else 8) * mixed
    if compiled:
        return held + 2 * a.heads
    copied = held if a.heads > 1 else 0
    return held + copied + 2 * a.heads * a.block_size
