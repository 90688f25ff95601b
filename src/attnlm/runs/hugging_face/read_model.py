"""Read a Hugging Face folder of the GPT-2, Llama, Mistral, Qwen2 and Qwen3 families.

config.json becomes an Architecture. The known keys are sizes, options, and keys without effect. An
option must have a value that our models can express. Any other key could mean a slightly different
model: unless its value is null, it raises an error that names the key.

The tensors are in model.safetensors, or in the files listed in model.safetensors.index.json. The
names, shapes and types of all tensors are checked before any tensor is read.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.setting_fields import check_value, quoted
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import Architecture, require_architecture
from attnlm.model.spec import Use
from attnlm.runs.external_formats import LLAMA3_TURNS, STOCK_CLASSES, TensorMapping
from attnlm.runs.safetensors_file import (
    FLOATS,
    Array,
    Shape,
    TensorFile,
    check_finite,
    explaining_read_errors,
)

Content = dict[str, Any]
_MOST_IDS = 2**21
_COPY = "copy the folder again from its source"
_HINT = "import a GPT-2, Llama, SmolLM, Mistral, Qwen2 or Qwen3 model without such options"

_ELSEWHERE: tuple[Any, ...] = ()
_NO_EFFECT = (
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version",
    "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "use_cache",
    "initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "n_ctx", "pretraining_tp",
    "reorder_and_upcast_attn", "max_window_layers", "_attn_implementation",
    "output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing",
    "is_llama_config", "transformers.js_config",
)  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """A family of models: those whose config.json has the same `model_type`."""

    model: str
    """our preset for the family: a value of the setting `model`"""
    stock: str
    """`model_type` of the class in STOCK_CLASSES with the family's names of sizes and tensors"""
    defaults: Mapping[str, Any]
    """values of sizes that config.json may lack; None stands for the default of our setting"""
    allowed: Mapping[str, tuple[Any, ...]]
    """the values of options that our models can express; () for an option checked elsewhere"""


_GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}
_GPT2_DEFAULTS = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
_GPT2_ALLOWED = {
    "activation_function": tuple(_GELU),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
}
_LLAMA_DEFAULTS = {
    **dict.fromkeys(("num_key_value_heads", "head_dim")),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_OFF, _SWITCH = (None, False), (None, False, True)
_ROTARY_ALLOWED = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    **dict.fromkeys(("rope_interleaved", "use_mrope"), _OFF),
    **dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling"), _ELSEWHERE),
}
_LLAMA_ALLOWED = {**_ROTARY_ALLOWED, "attention_bias": _SWITCH, "mlp_bias": _SWITCH}
_MISTRAL_ALLOWED = {**_ROTARY_ALLOWED, "sliding_window": _ELSEWHERE}
_QWEN2_ALLOWED = {**_MISTRAL_ALLOWED, "use_sliding_window": _SWITCH, "layer_types": _ELSEWHERE}
_QWEN3_ALLOWED = {**_QWEN2_ALLOWED, "attention_bias": _SWITCH, "mlp_bias": _OFF}
_FAMILIES = {
    "gpt2": _Family("gpt2", "gpt2", _GPT2_DEFAULTS, _GPT2_ALLOWED),
    "llama": _Family("llama", "llama", _LLAMA_DEFAULTS, _LLAMA_ALLOWED),
    "mistral": _Family("llama", "llama", _LLAMA_DEFAULTS, _MISTRAL_ALLOWED),
    "qwen2": _Family("llama", "qwen2", _LLAMA_DEFAULTS, _QWEN2_ALLOWED),
    "qwen3": _Family("qwen3", "qwen3", {**_LLAMA_DEFAULTS, "head_dim": 128}, _QWEN3_ALLOWED),
}
_SETTINGS = {"num_kv_heads": "kv_heads", "head_dim": "head_size", "mlp_dim": "mlp_width"}
"""the settings from which Architecture derives sizes, keyed by the names of these sizes"""
_DEFAULT_WINDOW = 4096  # tokens, for a Mistral or Qwen config that lacks the key
_FACTOR = {"factor": "rotary_factor"}
_ROTARY = {
    "default": dict[str, str](),
    "linear": _FACTOR,
    "llama3": {**_FACTOR, "original_max_position_embeddings": "rotary_context"},
}
"""For each supported type of rotary scaling: its keys in config.json, and our settings for them."""


@dataclass(frozen=True)
class DescribedModel:
    """The model that a config.json describes."""

    config: Config
    """the settings of a run with this architecture"""
    vocab_size: int
    positions: int
    """the model's context in tokens; a run may use a shorter one"""
    mappings: tuple[TensorMapping, ...]
    """the model's tensors; a bias of the architecture is zero if no tensor holds it"""
    shapes: Mapping[str, Shape]
    """the shapes of the parameters, by our names"""

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def read_config(path: Path, block_size: int | None = None) -> DescribedModel:
    """Return the model that a config.json describes.

    `block_size` shortens the context to this number of tokens. Raises AttnlmError if our models
    can't express the model, UsageError if the model's context is shorter than `block_size`.
    """
    content = files.json_object(path)
    kind = content.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if "attnlm" in content:
        raise AttnlmError(
            f"{path.parent} is already a run of attnlm", "use its path as RUN; do not import it"
        )
    if family is None:
        raise AttnlmError(
            f"{path} has model_type {quoted(kind)}, which attnlm does not support",
            f"import one of {', '.join(_FAMILIES)}",
        )
    stock = next(stock for stock in STOCK_CLASSES if stock.model_type == family.stock)
    elsewhere = dict.fromkeys((*_NO_EFFECT, *stock.sizes, "vocab_size"), _ELSEWHERE)
    allowed = {**elsewhere, **family.allowed}
    for key, value in content.items():  # () permits any value; a key not in `allowed` must be null
        if (values := allowed.get(key, (None,))) and value not in values:
            raise AttnlmError(
                f"{path} has {quoted(key)} {quoted(value)}, which attnlm does not support", _HINT
            )
    settings: dict[str, Any] = {}
    for key, attribute in stock.sizes.items():
        value, default = content.get(key), family.defaults.get(key)
        if value is None and key in family.defaults:
            value = default
        elif not isinstance(default, bool | float):  # `resolve` checks booleans and floats
            value = _size(path, content, key)
        if value is not None:
            settings[_SETTINGS.get(attribute, attribute)] = value
    if kind == "gpt2":
        settings["mlp"] = _GELU[content.get("activation_function", "gelu_new")]
        without_bias = list[str]()
    else:
        has_bias = {
            ".self_attn.": kind == "qwen2" or bool(content.get("attention_bias")),
            ".mlp.": bool(content.get("mlp_bias")),
        }
        without_bias = [name for name, biased in has_bias.items() if not biased]
        settings |= _rotary_settings(path, content)
        settings["qkv_bias"] = has_bias[".self_attn."]
        settings["bias"] = kind != "qwen2" and any(has_bias.values())
    size = _size(path, content, "vocab_size", at_most=_MOST_IDS)
    positions = settings["block_size"]
    if block_size is not None:
        check_value(Architecture, "block_size", block_size)
        if block_size > positions:
            raise UsageError(
                f"`block_size` {block_size:,} is longer than the model's context",
                f"use `block_size` {positions} or less",
            )
        settings["block_size"] = block_size
    if "sliding_window" in family.allowed:
        _check_window(path, content, settings)
    try:
        config = resolve({"model": family.model, **settings, "steps": 1})
    except UsageError as error:
        message = error.message.replace("`", "")  # no option is wrong
        raise AttnlmError(f"{path}: {message}", _HINT) from None
    mappings = (
        tensor
        for tensor in stock.tensor_mappings(require_architecture(config.spec, Use.EXPORT))
        if not (tensor.name.endswith(".bias") and any(p in tensor.name for p in without_bias))
    )
    shapes = config.spec.parameter_shapes(size)
    return DescribedModel(config, size, positions, tuple(mappings), shapes)


def without_empty_mlp(model: DescribedModel, weight: Callable[[str], Array]) -> DescribedModel:
    """Return a description of the same model without its MLP, if the MLP never adds anything.

    attnlm exports a model without MLP with such an MLP: one hidden unit, and zeros as its outgoing
    weights. `weight` returns a parameter, given our name for the parameter.
    """
    a = require_architecture(model.config.spec, Use.EXPORT)
    outgoing = [name for name in model.shapes if ".mlp.down." in name]
    if a.mlp_dim != 1 or any(weight(name).any() for name in outgoing):
        return model
    config = replace(model.config, spec=replace(a, mlp="none", mlp_width=None))
    shapes = config.spec.parameter_shapes(model.vocab_size)
    return replace(model, config=config, shapes=shapes)


def _size(path: Path, content: Content, key: str, at_most: int = 2**31) -> int:
    """Return the value of `key`. Raises AttnlmError unless it is an integer from 1 to `at_most`."""
    value = content.get(key)
    if type(value) is not int or not 0 < value <= at_most:
        raise AttnlmError(
            f"{path} has no {key}"
            if value is None
            else f"{path} has {key} {quoted(value)}, which is not a valid size",
            _COPY,
        )
    return value


def _rotary_settings(path: Path, content: Content) -> dict[str, Any]:
    """Return our settings of rotary positions. Raises AttnlmError for unsupported scaling."""
    theta = content.get("rope_theta")
    settings = {"rotary_base": 10_000.0 if theta is None else theta}
    for key in ("rope_scaling", "rope_parameters"):
        scaling = content.get(key)
        if not isinstance(scaling, dict | None):
            raise AttnlmError(f"{path} has {key} {quoted(scaling)}", _HINT)
        rope = {k: v for k, v in (scaling or {}).items() if v is not None}
        kinds = [rope.pop(k) for k in ("type", "rope_type") if k in rope] or ["default"]
        if rope.get("partial_rotary_factor") == 1:
            del rope["partial_rotary_factor"]
        if "rope_theta" in rope:
            settings["rotary_base"] = rope.pop("rope_theta")
        turns = {k: rope.pop(k) for k in LLAMA3_TURNS if k in rope and kinds[-1] == "llama3"}
        names = _ROTARY.get(kinds[-1] if isinstance(kinds[-1], str) else "")
        if names is None or rope.keys() != names.keys() or turns not in ({}, LLAMA3_TURNS):
            others = "".join(f", {quoted(k)}" for k in sorted({**rope, **turns})[:3])
            raise AttnlmError(
                f"{path} has a rotary scaling ({key} {quoted(kinds[-1])}{others}) that "
                "attnlm does not support",
                _HINT,
            )
        settings |= {names[k]: value for k, value in rope.items()}
    return settings


def _check_window(path: Path, content: Content, settings: Mapping[str, Any]) -> None:
    """Raise AttnlmError for unknown layer types, or a sliding window shorter than the context."""
    content = {"sliding_window": _DEFAULT_WINDOW, **content}
    slides = content["model_type"] == "mistral" or bool(content.get("use_sliding_window"))
    slides = slides and content["sliding_window"] is not None
    kinds = ["full_attention", "sliding_attention"] if slides else ["full_attention"]
    types, layers = content.get("layer_types"), settings["layers"]
    if types is not None and not (
        isinstance(types, list) and len(types) == layers and all(kind in kinds for kind in types)
    ):
        raise AttnlmError(
            f"{path} has 'layer_types' {quoted(types)}, which attnlm does not support", _HINT
        )
    if slides and (window := _size(path, content, "sliding_window")) < settings["block_size"]:
        raise AttnlmError(
            f"{path} has a sliding window of {window:,} tokens, shorter than the context of "
            f"{settings['block_size']:,}; attnlm has no sliding windows",
            f"import it with a shorter context: `block_size` {window}",
        )


# --- Tensors --------------------------------------------------------------------------------------

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
# Masks and rotary frequencies, which are computed here: older versions stored them.
_COMPUTED = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
    r"|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)


@contextlib.contextmanager
def open_weights(
    folder: Path, model: DescribedModel, file: Path | None = None
) -> Iterator[Callable[[str], Array]]:
    """Yield a function that returns a parameter in float32, given our name for the parameter.

    The tensors are in `folder`, or only in `file` if given. Raises AttnlmError before any tensor is
    read if files or tensors are missing or unexpected, or if a shape or type differs from
    `model`. The function raises AttnlmError for NaN and infinity.
    """
    file_of: dict[str, TensorFile] = {}
    with contextlib.ExitStack() as opening:
        for path in _weight_files(folder) if file is None else [file]:
            opened = opening.enter_context(open_tensors(path))
            for name in opened.tensors:
                if not _COMPUTED.fullmatch(name):
                    file_of[name] = opened
        # The published GPT-2 files lack the prefix, since they hold the model without its head.
        prefix = "" if any(name.startswith("transformer.") for name in file_of) else "transformer."
        places: dict[str, tuple[TensorMapping, int]] = {}  # by parameter: tensor, index in it
        for mapping in model.mappings:
            mapping = mapping._replace(name=mapping.name.removeprefix(prefix))
            places |= {ours: (mapping, i) for i, ours in enumerate(mapping.parameters)}
        _check_tensors(file_of, places, model)
        shapes = model.shapes

        def read_weight(name: str) -> Array:
            if name not in places:
                return np.zeros(shapes[name], np.float32)
            mapping, place = places[name]
            begin = sum(shapes[before][0] for before in mapping.parameters[:place])
            rows = slice(begin, begin + shapes[name][0])
            tensor = file_of[mapping.name].read_float32(mapping.name)
            values = tensor[:, rows].T if mapping.transposed else tensor[rows]
            check_finite(values)
            return values

        yield read_weight


def _check_tensors(
    file_of: Mapping[str, TensorFile],
    places: Mapping[str, tuple[TensorMapping, int]],
    model: DescribedModel,
) -> None:
    """Raise AttnlmError if the tensors in the files do not match the model."""
    # A position embedding is stored for the model's whole context, though the run's may be shorter.
    a = require_architecture(model.config.spec, Use.EXPORT)
    positions = (model.positions, a.width)
    shapes = {**model.shapes, "position_embedding.weight": positions}
    expected: dict[str, Shape] = {}
    for mapping, _ in places.values():
        rows = sum(shapes[ours][0] for ours in mapping.parameters)
        columns = shapes[mapping.parameters[0]][1:]
        expected[mapping.name] = (*columns, rows) if mapping.transposed else (rows, *columns)
    head = "lm_head.weight"  # may be stored although it is tied
    is_tied = head not in expected and head in file_of
    if is_tied and a.tie_embeddings:
        expected[head] = model.shapes["token_embedding.weight"]
    for name in sorted(expected.keys() - file_of.keys()):
        raise AttnlmError(f"the tensor {name} is missing", _COPY)
    for name in sorted(file_of.keys() - expected.keys()):
        raise AttnlmError(
            f"the tensor {quoted(name)} does not belong to the model in config.json",
            "import a GPT-2, Llama, SmolLM, Mistral, Qwen2 or Qwen3 model that was not changed",
        )
    for name, shape in expected.items():
        tensor = file_of[name].tensors[name]
        if tensor.shape != shape:
            raise AttnlmError(
                f"the tensor {name} has shape {tensor.shape}, but config.json gives {shape}", _COPY
            )
        if tensor.dtype not in FLOATS:
            raise AttnlmError(
                f"the tensor {name} has the type {tensor.dtype}, not one of {', '.join(FLOATS)}",
                "import a model that is not quantized",
            )
    embedding = places["token_embedding.weight"][0].name
    if is_tied and not np.array_equal(file_of[head].read(head), file_of[embedding].read(embedding)):
        raise AttnlmError(
            "config.json ties the LM head to the token embedding, but lm_head.weight differs",
            _COPY,
        )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WHOLE).exists():
        return [folder / _WHOLE]
    if not (folder / _INDEX).exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        raise AttnlmError(
            f"{folder} has neither {_WHOLE} nor {_INDEX}",
            "its weights are pickled and could run code: get them as safetensors"
            if pickled
            else "use a folder in Hugging Face's format",
        )
    places = files.json_object(folder / _INDEX).get("weight_map")
    names = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", name):
            raise AttnlmError(
                f"{_INDEX} names {quoted(name)}, which is not a safetensors file in its folder",
                _COPY,
            )
    return [folder / name for name in names]


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file and read its header. Raises AttnlmError if it can't be read."""
    with contextlib.ExitStack() as opening:
        with explaining_read_errors(path, " or not a safetensors file", _COPY):
            file = opening.enter_context(files.open_regular(path))
            opened = TensorFile.of(file)
        yield opened
