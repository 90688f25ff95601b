"""Which stock class of `transformers` computes what an Architecture computes, and with what names.

A class fits by the parts of a model, whatever its name. Where it has a bias, or positions, that the
model lacks, zeros stand for them, which changes no logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnlm.base.errors import UsageError
from attnlm.model.architecture import Architecture

_HINT = "train a model that has a stock class: `model` transformer, gpt2, llama or qwen3"


class Stored(NamedTuple):
    """A tensor of a stock class: its name, and the parameters of ours that it holds, one after
    another along their outputs. Matrices of GPT-2 lie transposed."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class StockClass:
    """A class of `transformers` for language models, and what it takes for a model to fit."""

    name: str
    model_type: str
    misfits: Callable[[Architecture], dict[str, bool]]
    """what a model may have that the class can't express, and whether this one has it"""
    config: Callable[[Architecture], dict[str, Any]]
    """the part of config.json that tells the architecture"""
    stored: Callable[[Architecture], Iterator[Stored]]
    """all tensors, in order; the LM head only where it is not the token embedding"""

    def reasons(self, a: Architecture) -> list[str]:
        """Why the model does not fit; nothing where it does."""
        return [reason for reason, holds in {**_misfits(a), **self.misfits(a)}.items() if holds]


def fitting_class(a: Architecture) -> StockClass | None:
    """The class that expresses a model exactly; None if none does."""
    if a.embed_dim is None:
        return None
    return next((stock for stock in STOCK_CLASSES if not stock.reasons(a)), None)


def stock_class_for(a: Architecture, run: str) -> StockClass:
    """The class that expresses a model exactly. Raises UsageError, with reasons, if none does."""
    if a.embed_dim is None:
        raise UsageError(
            f"no stock class of transformers can express {run}: a bigram is a table of logits, "
            "without layers",
            _HINT,
        )
    closest = min(STOCK_CLASSES, key=lambda stock: len(stock.reasons(a)))
    if reasons := closest.reasons(a):
        raise UsageError(
            f"no stock class of transformers can express {run}: it has {', '.join(reasons)}; "
            f"the closest is {closest.name}",
            _HINT,
        )
    return closest


def _misfits(a: Architecture) -> dict[str, bool]:
    """What no class has."""
    return {
        f"`attention` {a.attention}": a.attention != "softmax",
        "no `projection`": a.attention == "softmax" and not a.projection,
        "no `residual`": not a.residual,
        "no `mlp`": a.mlp == "none",
        "no `norm`": a.norm == "none",
        "a `head_bias`": a.head_bias,
    }


def _gpt2_misfits(a: Architecture) -> dict[str, bool]:
    return {
        "`positions` rotary": a.positions == "rotary",
        "`norm` rms": a.norm == "rms",
        "`mlp` swiglu": a.mlp == "swiglu",
        "`query_key_norm`": a.query_key_norm,
        "fewer `kv_heads` than `heads`": a.num_kv_heads != a.heads,
        "a `head_size` that is not `embed_dim` / `heads`": a.heads * a.head_dim != a.embed_dim,
    }


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


def _llama_misfits(a: Architecture) -> dict[str, bool]:
    return {
        f"`positions` {a.positions}": a.positions != "rotary",
        "`norm` layer": a.norm == "layer",
        f"`mlp` {a.mlp}": a.mlp in ("gelu", "relu2"),
        "`query_key_norm`": a.query_key_norm,
    }


def _qwen3_misfits(a: Architecture) -> dict[str, bool]:
    return {
        **_llama_misfits(a),
        "`query_key_norm`": False,
        "no `query_key_norm`": not a.query_key_norm,
        "a `bias` in the MLP": a.bias,
    }


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
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rotary_base},
        "attention_bias": _has_attention_biases(a),
        "attention_dropout": 0.0,
        "mlp_bias": a.bias,
    }


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
    StockClass("Qwen3ForCausalLM", "qwen3", _qwen3_misfits, _qwen3_config, _llama_stored),
    StockClass("LlamaForCausalLM", "llama", _llama_misfits, _llama_config, _llama_stored),
    StockClass("GPT2LMHeadModel", "gpt2", _gpt2_misfits, _gpt2_config, _gpt2_stored),
)
