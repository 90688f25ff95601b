"""Which stock class of `transformers` computes what an Architecture does, and with what names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attnlm.model.architecture import Architecture
from attnlm.runs.forms import (
    Form,
    Stored,
    form_for,
    gpt2_expressible,
    llama_expressible,
    qwen3_expressible,
)

LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""within the original context: frequencies below the first are divided, those above the second are
not"""


@dataclass(frozen=True)
class StockClass(Form):
    """A class of `transformers` for language models."""

    model_type: str
    config: Callable[[Architecture], dict[str, Any]]
    """the part of config.json that tells the architecture"""


def fitting_class(a: Architecture) -> StockClass | None:
    """The class that expresses a model exactly; None if none does."""
    if a.embed_dim is None:
        return None
    return next((stock for stock in STOCK_CLASSES if not stock.reasons(a)), None)


def stock_class_for(a: Architecture, run: str) -> StockClass:
    """The class that expresses a model exactly. Raises UsageError, with reasons, if none does."""
    return form_for(a, STOCK_CLASSES, run, "stock class of transformers")


def _gpt2_config(a: Architecture) -> dict[str, Any]:
    return {
        "n_positions": a.block_size,
        "n_embd": a.embed_dim,
        "n_layer": a.layers,
        "n_head": a.heads,
        "n_inner": a.mlp_dim,
        "activation_function": "gelu_new" if a.mlp == "gelu" else a.mlp,
        "layer_norm_epsilon": a.norm_epsilon,
        "embd_pdrop": a.dropout,
        "resid_pdrop": a.dropout,
        "attn_pdrop": 0.0,
    }


def _gpt2_stored(a: Architecture) -> Iterator[Stored]:
    yield Stored("transformer.wte.weight", ("token_embedding.weight",))
    yield Stored("transformer.wpe.weight", ("position_embedding.weight",))
    for layer in range(a.layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        maps = {
            "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
            "attn.c_proj": ("attention.projection",),
            "mlp.c_fc": ("mlp.up",),
            "mlp.c_proj": ("mlp.down",),
        }
        for name, parts in maps.items():
            weights = tuple(f"{ours}{part}.weight" for part in parts)
            yield Stored(f"{theirs}{name}.weight", weights, transposed=True)
            yield Stored(f"{theirs}{name}.bias", tuple(f"{ours}{part}.bias" for part in parts))
        for name, part in {"ln_1": "attention_norm", "ln_2": "mlp_norm"}.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{part}.gain",))
            yield Stored(f"{theirs}{name}.bias", (f"{ours}{part}.bias",))
    yield Stored("transformer.ln_f.weight", ("norm.gain",))
    yield Stored("transformer.ln_f.bias", ("norm.bias",))
    yield from _head(a)


def _llama_config(a: Architecture) -> dict[str, Any]:
    return {
        "max_position_embeddings": a.block_size,
        "hidden_size": a.embed_dim,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": a.norm_epsilon,
        "rope_theta": a.rotary_base,
        "rope_parameters": _rope_parameters(a),
        "attention_bias": _has_attention_biases(a),
        "attention_dropout": 0.0,
        "mlp_bias": a.bias,
    }


def _rope_parameters(a: Architecture) -> dict[str, Any]:
    base = {"rope_theta": a.rotary_base}
    if a.rotary_factor is None:
        return {"rope_type": "default", **base}
    if a.rotary_context is None:
        return {"rope_type": "linear", "factor": a.rotary_factor, **base}
    context = {"original_max_position_embeddings": a.rotary_context}
    return {"rope_type": "llama3", "factor": a.rotary_factor, **LLAMA3_TURNS, **context, **base}


def _qwen3_config(a: Architecture) -> dict[str, Any]:
    config = _llama_config(a) | {"use_sliding_window": False, "sliding_window": None}
    del config["mlp_bias"]
    return config


def _llama_stored(a: Architecture) -> Iterator[Stored]:
    yield Stored("model.embed_tokens.weight", ("token_embedding.weight",))
    for layer in range(a.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        attention = {"q": "query", "k": "key", "v": "value", "o": "projection"}
        maps = {f"self_attn.{x}_proj": f"attention.{name}" for x, name in attention.items()}
        mlp = {f"mlp.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")}
        for name, part in {**maps, **mlp}.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{part}.weight",))
            if _has_attention_biases(a) if name in maps else a.bias:
                yield Stored(f"{theirs}{name}.bias", (f"{ours}{part}.bias",))
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        if a.query_key_norm:
            norms |= {f"self_attn.{x}_norm": f"attention.{attention[x]}_norm" for x in "qk"}
        for name, part in norms.items():
            yield Stored(f"{theirs}{name}.weight", (f"{ours}{part}.gain",))
    yield Stored("model.norm.weight", ("norm.gain",))
    yield from _head(a)


def _has_attention_biases(a: Architecture) -> bool:
    """They have one switch for the query, key, value and output maps; ours are two."""
    return a.qkv_bias or a.bias


def _head(a: Architecture) -> Iterator[Stored]:
    if not a.tie_embeddings:
        yield Stored("lm_head.weight", ("head.weight",))


STOCK_CLASSES = (
    StockClass("Qwen3ForCausalLM", qwen3_expressible, _llama_stored, "qwen3", _qwen3_config),
    StockClass("LlamaForCausalLM", llama_expressible, _llama_stored, "llama", _llama_config),
    StockClass("GPT2LMHeadModel", gpt2_expressible, _gpt2_stored, "gpt2", _gpt2_config),
)
