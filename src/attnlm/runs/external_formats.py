"""The classes of `transformers` for our models, with their names of sizes and tensors.

Whether a class can express a model depends on the model's architecture, not on its name. If a class
has parts that a model lacks, parts are stored that change no logit: biases, position embeddings and
an MLP of zeros, and the identity as a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from attnlm.base.errors import UsageError
from attnlm.base.suggestions import suggestion
from attnlm.model.architecture import Architecture

FORMATS = ("hf", "html")
"""The formats that runs are exported to."""
PAGE_TYPES = ("f32", "f16")
"""The number types of a page; the format hf is always float32."""

Supported = Mapping[str, tuple[Any, ...] | None]
"""The values that a class can express, keyed by field of Architecture; None stands for all values.
For a field that is not a key, the class can express only the field's default."""

LLAMA3_TURNS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""limits for the number of rotations of a frequency within the original context: below the first
limit, the frequency is divided by the factor; above the second limit, it is unchanged"""


class TensorMapping(NamedTuple):
    """A tensor of `transformers`, which holds one or more parameters of a model of attnlm.

    `parameters` are attnlm's names of these. Several parameters are concatenated along their
    outputs. If `transposed`, the tensor is the transpose of attnlm's matrix.
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class StockClass:
    """A class of `transformers` for language models."""

    name: str
    supported: Supported
    sizes: Mapping[str, str]
    """attributes of Architecture, such as embed_dim, keyed by the class's names, such as n_embd"""
    modules: Mapping[str, str]
    """the class's names of modules, keyed by our names; {} stands for the number of the block; if
    the class stores several of our modules as one, the key has all our names, separated by
    spaces"""
    has_bias: Callable[[Architecture, str], bool]
    """whether the class's module has a bias; the argument of type str is the last word of our name
    for the module, such as query"""
    model_type: str
    transposes: bool = field(default=False, kw_only=True)
    """whether the class stores the matrices of linear layers transposed"""
    tokenizer: str | None = field(default=None, kw_only=True)
    """the name of the only tokenizer that `transformers` reads with this class, whatever
    tokenizer.json has; None if it reads any tokenizer"""

    def with_missing_parts(self, a: Architecture) -> Architecture:
        """Return the model with the parts that this class always has and the model lacks.

        These parts change no logit: an MLP with one hidden unit and position embeddings, both of
        zeros, and a projection that is the identity.
        """
        if a.lm_head_inputs != a.width:
            return a  # the identity cannot change the width
        parts: dict[str, Any] = {"projection": True}
        if a.mlp == "none":
            mlps = self.supported["mlp"] or ()
            parts |= {"mlp": mlps[0], "mlp_width": 1}
        if a.positions == "none" and "learned" in (self.supported["positions"] or ()):
            parts["positions"] = "learned"
        return replace(a, **parts)

    def unsupported_parts(self, a: Architecture) -> list[str]:
        """Return, in words, what this class can't express of the model; [] if it fits."""
        if a.embed_dim is None:
            return ["a table of logits, and no layers"]
        a = self.with_missing_parts(a)
        values = {part.name: getattr(a, part.name) for part in fields(a)}
        # These are the defaults, written out.
        values["kv_heads"] = None if a.num_kv_heads == a.heads else a.kv_heads
        values["head_size"] = None if a.head_dim * a.heads == a.embed_dim else a.head_size
        unsupported = []
        for part in fields(a):
            name = f"`{part.name}`"
            value = values[part.name]
            allowed = self.supported.get(part.name, (part.default,))
            if allowed is not None and value not in allowed:
                is_off = value in (False, None, "none")
                unsupported.append(
                    f"no {name}" if is_off else name if value is True else f"{name} {value}"
                )
        return unsupported

    def options(self, a: Architecture) -> dict[str, Any]:
        """Return what config.json contains in addition to sizes."""
        if self.model_type == "gpt2":
            function = "gelu_new" if a.mlp == "gelu" else a.mlp
            dropout = {"embd_pdrop": a.dropout, "resid_pdrop": a.dropout, "attn_pdrop": 0.0}
            return {"activation_function": function, **dropout}
        rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rotary_base}
        if a.rotary_factor is not None:
            rotary |= {"rope_type": "linear", "factor": a.rotary_factor}
        if a.rotary_context is not None:
            context = {"original_max_position_embeddings": a.rotary_context}
            rotary |= {"rope_type": "llama3", **LLAMA3_TURNS, **context}
        common = {
            "hidden_act": "silu",
            "rope_theta": a.rotary_base,  # for older versions of transformers
            "rope_parameters": rotary,
            "attention_dropout": 0.0,
        }
        if self.model_type == "llama":
            return common | {"attention_bias": a.qkv_bias or a.bias, "mlp_bias": a.bias}
        common |= {"use_sliding_window": False, "sliding_window": None}
        return common | ({"attention_bias": a.qkv_bias} if self.model_type == "qwen3" else {})

    def tensor_mappings(self, a: Architecture) -> Iterator[TensorMapping]:
        """Yield the tensors of a file: all except an LM head that is tied to the embedding."""
        missing = ["head"] if a.tie_embeddings else []
        missing += [] if a.query_key_norm else ["attention.query_norm", "attention.key_norm"]
        for layer in range(-1, a.layers):  # -1 stands for the modules outside of blocks
            for our_names, external_name in self.modules.items():
                if ("{}" in external_name) != (layer >= 0) or our_names in missing:
                    continue
                name = external_name.format(layer)
                kind = our_names.rpartition(".")[2]
                block = f"blocks.{layer}." if layer >= 0 else ""
                modules = [block + name for name in our_names.split()]
                weight = "gain" if kind.endswith("norm") else "weight"
                weights = tuple(f"{module}.{weight}" for module in modules)
                transposed = self.transposes and kind in _MAPS
                yield TensorMapping(f"{name}.weight", weights, transposed)
                if self.has_bias(a, kind):
                    biases = tuple(f"{module}.bias" for module in modules)
                    yield TensorMapping(f"{name}.bias", biases)


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    form: str
    """a class of `transformers`, or "a page of" and its file size"""
    checkpoint: str
    """best or last; for a page with several runs, the values that occur, separated by commas"""


def check_format(to: str, type: str | None) -> None:
    """Raise UsageError if `to` is not a format, or if that format lacks the number type `type`."""
    for name, value, choices in (("to", to, FORMATS), ("type", type, PAGE_TYPES)):
        if value is not None and value not in choices:
            hint = suggestion(value, choices, f"choose from {', '.join(choices)}")
            raise UsageError(f"invalid value for `{name}`: {value!r}", hint)
    if type is not None and to == "hf":
        raise UsageError(
            "`type` applies only to `to` html", "leave `type` out: hf always has float32"
        )


def choose_class(a: Architecture, tokenizer: str, run: str) -> StockClass:
    """Return the first class that can express the model of a run and its tokenizer, given by name.

    Raises UsageError if there is none.
    """
    classes = [stock for stock in STOCK_CLASSES if stock.tokenizer in (None, tokenizer)]
    closest = min(classes, key=lambda stock: len(stock.unsupported_parts(a)))
    if parts := closest.unsupported_parts(a):
        raise UsageError(
            f"no stock class of transformers can express {run}: it has {', '.join(parts)}; "
            f"the closest format is {closest.name}",
            "train a `model` transformer, gpt2, llama or qwen3 without these settings",
        )
    return closest


# --- What families of models can express ----------------------------------------------------------

_ALL_VALUES = (
    "model", "embed_dim", "layers", "block_size", "heads", "kv_heads", "head_size", "wide_heads",
    "qkv_bias", "rotary_base", "rotary_factor", "rotary_context", "norm_epsilon", "mlp_width",
    "bias", "tie_embeddings", "dropout",
)  # fmt: skip
_COMMON: Supported = {
    **dict.fromkeys(_ALL_VALUES),
    "attention": ("softmax",),
    "projection": (True,),
    "residual": (True,),
    "head_bias": (False,),
}


_LLAMA: Supported = {**_COMMON, "positions": ("rotary",), "norm": ("rms",), "mlp": ("swiglu",)}
_QWEN2: Supported = {**_LLAMA, "head_size": (None,), "qkv_bias": (True,), "bias": (False,)}
_QWEN3: Supported = {**_LLAMA, "query_key_norm": (True,), "bias": (False,)}
_GPT2: Supported = {
    **_COMMON,
    **dict.fromkeys(("kv_heads", "head_size"), (None,)),
    "wide_heads": (False,),
    "positions": ("learned",),
    "norm": ("layer",),
    "mlp": ("gelu", "relu2"),
}


# --- Which modules have a bias --------------------------------------------------------------------

_MAPS = ("query", "key", "value", "projection", "gate", "up", "down")  # the linear maps of a block


def _has_own_bias(a: Architecture, kind: str) -> bool:
    """Return True if modules named `kind` have a bias in our models with RMS norm."""
    return a.qkv_bias if kind in ("query", "key", "value") else a.bias and kind in _MAPS


def _has_llama_bias(a: Architecture, kind: str) -> bool:
    """Return True if modules named `kind` have a bias in transformers' classes for Llama and Qwen3.
    There, query, key, value and projection all have a bias if one of them has a bias in attnlm."""
    if kind in ("query", "key", "value", "projection"):
        return a.qkv_bias or a.bias
    return _has_own_bias(a, kind)


def _has_gpt2_bias(a: Architecture, kind: str) -> bool:
    return kind in _MAPS or kind.endswith("norm")


# --- Our names, and the names in transformers -----------------------------------------------------

_GPT2_MODULES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attention_norm": "transformer.h.{}.ln_1",
    "attention.query attention.key attention.value": "transformer.h.{}.attn.c_attn",
    "attention.projection": "transformer.h.{}.attn.c_proj",
    "mlp_norm": "transformer.h.{}.ln_2",
    "mlp.up": "transformer.h.{}.mlp.c_fc",
    "mlp.down": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_LLAMA_MODULES = {
    "token_embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{}.input_layernorm",
    "attention.query": "model.layers.{}.self_attn.q_proj",
    "attention.key": "model.layers.{}.self_attn.k_proj",
    "attention.value": "model.layers.{}.self_attn.v_proj",
    "attention.projection": "model.layers.{}.self_attn.o_proj",
    "attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "attention.key_norm": "model.layers.{}.self_attn.k_norm",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "mlp.gate": "model.layers.{}.mlp.gate_proj",
    "mlp.up": "model.layers.{}.mlp.up_proj",
    "mlp.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_GPT2_SIZES = {
    "n_positions": "block_size",
    "n_embd": "embed_dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "mlp_dim",
    "layer_norm_epsilon": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
_LLAMA_SIZES = {
    "max_position_embeddings": "block_size",
    "hidden_size": "embed_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
_LLAMA_NAMES = (_LLAMA_SIZES, _LLAMA_MODULES)

STOCK_CLASSES = (
    StockClass("Qwen3ForCausalLM", _QWEN3, *_LLAMA_NAMES, _has_llama_bias, "qwen3"),
    StockClass(
        "Qwen2ForCausalLM", _QWEN2, *_LLAMA_NAMES, _has_own_bias, "qwen2", tokenizer="qwen2"
    ),
    StockClass("LlamaForCausalLM", _LLAMA, *_LLAMA_NAMES, _has_llama_bias, "llama"),
    StockClass(
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_SIZES,
        _GPT2_MODULES,
        _has_gpt2_bias,
        "gpt2",
        transposes=True,
    ),
)
