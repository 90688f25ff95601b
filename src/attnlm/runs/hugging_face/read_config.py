"""From a config.json of the GPT-2, Llama and Qwen3 families to an Architecture.

Every key is known to have no effect here, is taken, or must have the value that our parts mean.
Any other is refused by name: a model that is almost the same is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import check_value, quoted
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import Architecture
from attnlm.runs.hugging_face.stock_classes import LLAMA3_TURNS

Content = dict[str, Any]
_LARGEST = 2**20  # bytes
_MOST_IDS = 2**21
_HINT = "import a model of the GPT-2, Llama or Qwen3 family without such options"

_FACTOR = {"factor": "rotary_factor"}
_ROTARY = {
    "default": dict[str, str](),
    "linear": _FACTOR,
    "llama3": {**_FACTOR, "original_max_position_embeddings": "rotary_context"},
}
"""Kinds of scaling, and which setting of ours each key is."""

_NO_EFFECT = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "use_cache"),
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj", "task_specific_params", "n_ctx", "pretraining_tp"),
        *("reorder_and_upcast_attn", "max_window_layers", "_attn_implementation"),
        *("output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing"),
        *("rope_theta", "rope_parameters", "rope_scaling"),
    )
)


@dataclass(frozen=True)
class Described:
    """What a config.json describes."""

    config: Config
    """of a run with this architecture"""
    vocab_size: int
    positions: int
    """tokens that it sees, of which a run may take less"""
    absent: Callable[[str], bool]
    """whether the config says that there is no such bias: zeros stand for it here"""


def read_config(path: Path, block_size: int | None = None) -> Described:
    """The model that a config.json describes, with a context of `block_size` tokens if given.

    Raises AttnlmError where ours can't be that, UsageError for a longer context than it has.
    """
    content = read_object(path)
    kind = content.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise AttnlmError(
            f"{path} is of model_type {quoted(kind)}, which attnlm does not have",
            f"import one of {', '.join(_FAMILIES)}",
        )
    settings, required, absent = family(_Reader(path, content))
    known = {*_NO_EFFECT, *required, *_USED[str(kind)]}
    for key, value in content.items():
        if (key not in known and value is not None) or (
            key in required and value not in required[key]
        ):
            raise AttnlmError(
                f"{path} has {quoted(key)} {quoted(value)}, which attnlm can't compute", _HINT
            )
    size = _Reader(path, content).whole("vocab_size", at_most=_MOST_IDS)
    positions = int(settings["block_size"])
    if block_size is not None:
        check_value(Architecture, "block_size", block_size)
        if block_size > positions:
            raise UsageError(
                f"`block_size` {block_size:,} is longer than the model's context",
                f"give {positions:,} or less",
            )
        settings["block_size"] = block_size
    try:
        config = resolve({"model": str(kind), **settings, "steps": 1})
    except UsageError as error:
        raise AttnlmError(f"{path}: {error.message}", _HINT) from None
    return Described(config, size, positions, absent)


def read_object(path: Path, at_most: int = _LARGEST) -> Content:
    """A JSON file's object. Raises AttnlmError for anything else."""
    try:
        content = json.loads(files.read_bytes(path, at_most).decode())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise AttnlmError(f"{path} is not a JSON object", "copy it again from where it came")
    return content


@dataclass(frozen=True)
class _Reader:
    path: Path
    content: Mapping[str, Any]

    def whole(self, key: str, default: int | None = None, at_most: int = 2**31) -> int:
        """A size: a number of things, at least one."""
        value = self.content.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= at_most:
            raise AttnlmError(
                f"{self.path} lacks {key}"
                if value is None
                else f"{self.path} has {key} {quoted(value)}, which is no size",
                "copy it again from where it came",
            )
        return value

    def value(self, key: str, default: Any) -> Any:
        """Checked as a setting afterwards."""
        value = self.content.get(key)
        return default if value is None else value

    def rotary(self) -> dict[str, Any]:
        """Settings of rotary positions. Raises AttnlmError for those that are scaled otherwise."""
        settings = {"rotary_base": self.value("rope_theta", 10_000.0)}
        for key in ("rope_scaling", "rope_parameters"):
            scaling = self.value(key, {})
            if not isinstance(scaling, dict):
                raise AttnlmError(f"{self.path} has {key} {quoted(scaling)}", _HINT)
            parts = {k: v for k, v in scaling.items() if v is not None}
            kinds = [parts.pop(k) for k in ("type", "rope_type") if k in parts] or ["default"]
            if "rope_theta" in parts:
                settings["rotary_base"] = parts.pop("rope_theta")
            turns = {k: parts.pop(k) for k in LLAMA3_TURNS if k in parts and kinds[-1] == "llama3"}
            known = _ROTARY.get(kinds[-1] if isinstance(kinds[-1], str) else "")
            if known is None or parts.keys() != known.keys() or turns not in ({}, LLAMA3_TURNS):
                others = "".join(f", {quoted(k)}" for k in sorted({**parts, **turns})[:3])
                raise AttnlmError(
                    f"{self.path} has rotary positions that are scaled ({key} {quoted(kinds[-1])}"
                    f"{others}), which attnlm can't compute",
                    _HINT,
                )
            settings |= {known[k]: value for k, value in parts.items()}
        return settings


_Family = tuple[dict[str, Any], dict[str, tuple[Any, ...]], Callable[[str], bool]]


def _gpt2(read: _Reader) -> _Family:
    width = read.whole("n_embd")
    mlp = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}
    function = read.value("activation_function", "gelu_new")
    settings = {
        "embed_dim": width,
        "layers": read.whole("n_layer"),
        "heads": read.whole("n_head"),
        "block_size": read.whole("n_positions"),
        "mlp": mlp.get(function if isinstance(function, str) else "", "gelu"),
        "mlp_width": read.whole("n_inner", 4 * width),
        "norm_epsilon": read.value("layer_norm_epsilon", 1e-5),
        "tie_embeddings": read.value("tie_word_embeddings", True),
    }
    required = {
        "activation_function": tuple(mlp),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    }
    return settings, required, lambda name: False


def _llama(read: _Reader) -> _Family:
    attention, mlp = (read.value(key, False) for key in ("attention_bias", "mlp_bias"))
    width, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    settings = {
        "embed_dim": width,
        "layers": read.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": read.whole("num_key_value_heads", heads),
        "head_size": read.whole("head_dim", max(1, width // heads)),
        "block_size": read.whole("max_position_embeddings"),
        "mlp_width": read.whole("intermediate_size"),
        "norm_epsilon": read.value("rms_norm_eps", 1e-6),
        **read.rotary(),
        "qkv_bias": attention,
        "bias": attention is True or mlp is True,
        "tie_embeddings": read.value("tie_word_embeddings", False),
    }
    required: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "partial_rotary_factor": (None, 1.0),
        "attention_bias": (None, False, True),
        "mlp_bias": (None, False, True),
    }

    def absent(name: str) -> bool:
        return name.endswith(".bias") and not (mlp if ".mlp." in name else attention)

    return settings, required, absent


def _qwen3(read: _Reader) -> _Family:
    settings, required, absent = _llama(read)
    settings["head_size"] = read.whole("head_dim", 128)
    required["mlp_bias"] = (None, False)
    required["use_sliding_window"] = (None, False)
    full = ["full_attention"] * int(settings["layers"]) if settings["layers"] < 2**12 else None
    required["layer_types"] = (None, full)
    return settings, required, absent


_FAMILIES: dict[str, Callable[[_Reader], _Family]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen3": _qwen3,
}
_LLAMA_USED = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "intermediate_size", "rms_norm_eps"),
    *("tie_word_embeddings", "vocab_size"),
)
_USED = {
    "gpt2": (
        *("n_embd", "n_layer", "n_head", "n_positions", "n_inner", "layer_norm_epsilon"),
        *("tie_word_embeddings", "vocab_size"),
    ),
    "llama": _LLAMA_USED,
    "qwen3": (*_LLAMA_USED, "sliding_window"),  # of use only with use_sliding_window
}
