"""Which architecture of llama.cpp computes what an Architecture computes, and with what names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attnlm.model.architecture import Architecture
from attnlm.runs.forms import (
    Expressible,
    Form,
    Stored,
    form_for,
    gpt2_expressible,
    llama_expressible,
    qwen3_expressible,
)


@dataclass(frozen=True)
class GgufArchitecture(Form):
    """An architecture that llama.cpp knows by its name."""

    metadata: Callable[[Architecture], dict[str, Any]]
    """what tells the sizes, below the architecture's name"""


def architecture_for(a: Architecture, run: str) -> GgufArchitecture:
    """The architecture that expresses a model. Raises UsageError, with reasons, if none does."""
    return form_for(a, ARCHITECTURES, run, "architecture of llama.cpp")


def _gpt2_expressible(a: Architecture) -> Expressible:
    return {**gpt2_expressible(a), "mlp": ("gelu",)}


def _llama_expressible(a: Architecture) -> Expressible:
    return {**llama_expressible(a), "rotary_factor": (None,)}


def _qwen3_expressible(a: Architecture) -> Expressible:
    return {**qwen3_expressible(a), "rotary_factor": (None,)}


def _sizes(a: Architecture) -> dict[str, Any]:
    return {
        "context_length": a.block_size,
        "embedding_length": a.embed_dim,
        "block_count": a.layers,
        "feed_forward_length": a.mlp_dim,
        "attention.head_count": a.heads,
    }


def _gpt2_metadata(a: Architecture) -> dict[str, Any]:
    return {**_sizes(a), "attention.layer_norm_epsilon": a.norm_epsilon}


def _llama_metadata(a: Architecture) -> dict[str, Any]:
    return {
        **_sizes(a),
        "attention.head_count_kv": a.num_kv_heads,
        "attention.key_length": a.head_dim,
        "attention.value_length": a.head_dim,
        "attention.layer_norm_rms_epsilon": a.norm_epsilon,
        "rope.dimension_count": a.head_dim,
        "rope.freq_base": a.rotary_base,
    }


def _gpt2_stored(a: Architecture) -> Iterator[Stored]:
    yield Stored("token_embd.weight", ("token_embedding.weight",))
    yield Stored("position_embd.weight", ("position_embedding.weight",))
    for layer in range(a.layers):
        ours, theirs = f"blocks.{layer}.", f"blk.{layer}."
        maps = {
            "attn_qkv": ("attention.query", "attention.key", "attention.value"),
            "attn_output": ("attention.projection",),
            "ffn_up": ("mlp.up",),
            "ffn_down": ("mlp.down",),
        }
        for name, parts in maps.items():
            for kind in ("weight", "bias"):
                yield Stored(f"{theirs}{name}.{kind}", tuple(f"{ours}{p}.{kind}" for p in parts))
        for name, part in {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{part}.gain",))
            yield Stored(f"{theirs}{name}.bias", (f"{ours}{part}.bias",))
    yield Stored("output_norm.weight", ("norm.gain",))
    yield Stored("output_norm.bias", ("norm.bias",))
    yield from _head(a)


def _llama_stored(a: Architecture) -> Iterator[Stored]:
    """llama.cpp's llama turns pairs of neighbours; ours, and its qwen3, pairs from two halves."""
    return _rotary_stored(a, interleaved=True)


def _qwen3_stored(a: Architecture) -> Iterator[Stored]:
    return _rotary_stored(a, interleaved=False)


def _rotary_stored(a: Architecture, *, interleaved: bool) -> Iterator[Stored]:
    yield Stored("token_embd.weight", ("token_embedding.weight",))
    heads = {"attn_q": a.heads, "attn_k": a.num_kv_heads} if interleaved else {}
    maps = {
        "attn_q": ("attention.query", a.qkv_bias),
        "attn_k": ("attention.key", a.qkv_bias),
        "attn_v": ("attention.value", a.qkv_bias),
        "attn_output": ("attention.projection", a.bias),
        **{f"ffn_{name}": (f"mlp.{name}", a.bias) for name in ("gate", "up", "down")},
    }
    norms = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
    if a.query_key_norm:
        norms |= {"attn_q_norm": "attention.query_norm", "attn_k_norm": "attention.key_norm"}
    for layer in range(a.layers):
        ours, theirs = f"blocks.{layer}.", f"blk.{layer}."
        for name, (part, has_bias) in maps.items():
            for kind in ("weight", "bias") if has_bias else ("weight",):
                own = (f"{ours}{part}.{kind}",)
                yield Stored(f"{theirs}{name}.{kind}", own, interleaved=heads.get(name, 0))
        for name, part in norms.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{part}.gain",))
    yield Stored("output_norm.weight", ("norm.gain",))
    yield from _head(a)


def _head(a: Architecture) -> Iterator[Stored]:
    if not a.tie_embeddings:
        yield Stored("output.weight", ("head.weight",))


ARCHITECTURES = (
    GgufArchitecture("qwen3", _qwen3_expressible, _qwen3_stored, _llama_metadata),
    GgufArchitecture("llama", _llama_expressible, _llama_stored, _llama_metadata),
    GgufArchitecture("gpt2", _gpt2_expressible, _gpt2_stored, _gpt2_metadata),
)
