"""What block.c needs to compute a block: its sizes, the kinds of its modules, its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from attnlm.model.attention import SelfAttention
from attnlm.model.layers import Hookable, LayerNorm, Linear, RMSNorm, is_plain
from attnlm.model.mlp import MLP
from attnlm.model.ops.block import NativeBlock

if TYPE_CHECKING:
    from attnlm.model.language_model import Block

_NORMS = {type(None): "none", RMSNorm: "rms", LayerNorm: "layer"}


def make_native_block(block: Block) -> NativeBlock | None:
    """Return what block.c needs of a block, or None if block.c cannot compute it."""
    attention = block.attention
    mlp = block.mlp
    if not isinstance(attention, SelfAttention) or not isinstance(mlp, MLP | None):
        return None  # own code or attention without parameters
    if not block.residual or attention.projection is None or attention.scores is not None:
        return None
    maps = {
        "query": attention.query,
        "key": attention.key,
        "value": attention.value,
        "projection": attention.projection,
    }
    norms = {"attention": block.attention_norm}
    if mlp is not None:
        maps |= {"up": mlp.up, "down": mlp.down}
        maps |= {} if mlp.gate is None else {"gate": mlp.gate}
        norms["mlp"] = block.mlp_norm
    norm = block.attention_norm
    if type(norm) not in _NORMS or {type(other) for other in norms.values()} != {type(norm)}:
        return None
    norms |= {"query": attention.query_norm, "key": attention.key_norm}
    modules = (attention, mlp, block.dropout, *norms.values(), *maps.values())
    if not all(map(_has_plain_call, modules)):
        return None
    return NativeBlock(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        size=attention.head_size,
        hidden=0 if mlp is None else mlp.up.out_features,
        norm=_NORMS[type(norm)],
        mlp="none" if mlp is None else mlp.kind,
        epsilon=0.0 if norm is None else norm.epsilon,
        qk_epsilon=0.0 if attention.query_norm is None else attention.query_norm.epsilon,
        weights=_weights_by_name(maps, norms),
    )


def _has_plain_call(module: nn.Module | None) -> bool:
    """Return True if a module is absent, or a call of it does no more than its class."""
    return module is None or (isinstance(module, Hookable) and is_plain(module, type(module)))


def _weights_by_name(
    maps: dict[str, Linear], norms: dict[str, RMSNorm | LayerNorm | None]
) -> dict[str, nn.Parameter]:
    """Return weights and biases by their names in the struct `weights` of block.c."""
    weights: list[tuple[str, Any]] = []
    for name, linear in maps.items():
        weights += [(name, linear.weight), (f"{name}_bias", linear.bias)]
    for name, norm in norms.items():
        if norm is not None:
            weights.append((f"{name}_gain", norm.gain))
        if isinstance(norm, LayerNorm):
            weights.append((f"{name}_shift", norm.bias))
    return {name: parameter for name, parameter in weights if parameter is not None}
