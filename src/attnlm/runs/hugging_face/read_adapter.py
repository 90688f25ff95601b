"""An adapter of `peft` as adapters of ours: exact, or refused by the name of what can't be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.settings import quoted
from attnlm.model.architecture import Architecture
from attnlm.model.sizes import LoRA, map_name, map_shapes
from attnlm.runs.hugging_face.adapter import CONFIG, PREFIX, TENSORS, Module, modules
from attnlm.runs.hugging_face.read_config import read_object
from attnlm.runs.hugging_face.read_weights import open_tensors
from attnlm.runs.hugging_face.stock_classes import StockClass
from attnlm.runs.safetensors_file import FLOATS, TensorFile

_HINT = "save a plain LoRA adapter with peft: no biases, no other modules, weights not decomposed"
_COPY = "copy the folder again from where it came"
_MOST_RANK, _LARGEST_NUMBER = 2**12, 1e9
# What an adapter may say for nothing: of its training, or of how it is loaded.
_NO_EFFECT = frozenset(
    (
        *("task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
        *("target_modules", "fan_in_fan_out", "auto_mapping", "peft_version", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "runtime_config", "qalora_group_size"),
        *("layers_to_transform", "layers_pattern", "exclude_modules", "ensure_weight_tying"),
    )
)
_TAKEN = frozenset(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"))
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others have changed the weights that the adapter is for.
    "init_lora_weights": (True, False, "gaussian", None),
}


class Adapter(NamedTuple):
    """Adapters by the names of our parameters."""

    lora: LoRA
    tensors: dict[str, Tensor]


def read_adapter(folder: Path, a: Architecture, stock: StockClass) -> Adapter:
    """The adapter in a folder of `peft`, for a model of such a stock class.

    Ranks that differ from module to module are filled up with zeros, and B is scaled where alpha /
    rank differs. Raises AttnlmError for files that are missing or damaged, and for what our
    adapters can't be.
    """
    config = read_object(folder / CONFIG)
    _check(config, folder / CONFIG)
    known = {module.name: module for module in modules(stock, a)}
    with open_tensors(folder / TENSORS) as file:
        maybe = {name: _pair(file, module, a) for name, module in known.items()}
        pairs = {name: pair for name, pair in maybe.items() if pair is not None}
        read = {f"{PREFIX}{n}.lora_{x}.weight" for n in pairs for x in "AB"}
        for name in sorted(file.header.tensors.keys() - read):
            raise AttnlmError(f"the tensor {quoted(name)} is none of {stock.name}'s maps", _HINT)
    if not pairs:
        raise AttnlmError(f"{folder / TENSORS} has no adapters of {stock.name}", _COPY)
    ranks = {name: len(down) for name, (down, _) in pairs.items()}
    rank = max(ranks.values())
    scales = {name: _scale(config, known[name], ranks[name], folder / CONFIG) for name in pairs}
    scale = next(iter(scales.values()))
    on = {map_name(path) for name in pairs for path in known[name].maps}
    lora = LoRA(rank, scale * rank, tuple(name for name in map_shapes(a) if name in on))
    return Adapter(lora, dict(_ours(a, lora, known, pairs, scales)))


def _ours(
    a: Architecture,
    lora: LoRA,
    known: Mapping[str, Module],
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    scales: Mapping[str, float],
) -> Any:
    """Every adapter of ours; zeros where a layer has none."""
    shapes = map_shapes(a)
    for name, module in known.items():
        down, up = pairs.get(name, (None, None))
        row = 0
        for path in module.maps:
            outputs, inputs = shapes[map_name(path)]
            rows = slice(row, row := row + outputs)
            if map_name(path) not in lora.on:
                continue
            whole_down, whole_up = torch.zeros(lora.rank, inputs), torch.zeros(outputs, lora.rank)
            if down is not None and up is not None:
                whole_down[: len(down)] = down
                whole_up[:, : len(down)] = up[rows] * (scales[name] / lora.scale)
            yield f"{path}.lora_down", whole_down
            yield f"{path}.lora_up", whole_up


def _check(config: Mapping[str, Any], path: Path) -> None:
    for key, value in config.items():
        is_off = value is None or value is False or value in ([], {}, 0)
        if key in _REQUIRED:
            refused = value not in _REQUIRED[key]
        else:
            refused = key not in _NO_EFFECT | _TAKEN and not is_off
        if refused:
            raise AttnlmError(
                f"{path} has {quoted(key)} {quoted(value)}, which attnlm can't compute", _HINT
            )


def _pair(file: TensorFile, module: Module, a: Architecture) -> tuple[Tensor, Tensor] | None:
    """A (rank, inputs) and B (outputs, rank) of a module; None where it has no adapter."""
    names = [f"{PREFIX}{module.name}.lora_{x}.weight" for x in "AB"]
    there = [name for name in names if name in file.header.tensors]
    if not there:
        return None
    if len(there) < 2:
        raise AttnlmError(f"of {module.name} only {there[0]} is there", _COPY)
    down, up = (_tensor(file, name) for name in names)
    shapes = [map_shapes(a)[map_name(path)] for path in module.maps]
    rank = len(down) if down.ndim else 0
    outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
    if not 0 < rank <= _MOST_RANK or (down.shape, up.shape) != ((rank, inputs), (outputs, rank)):
        raise AttnlmError(
            f"the adapters of {module.name} have shapes {tuple(down.shape)} and {tuple(up.shape)}, "
            f"and the map is ({outputs}, {inputs})",
            "give the run that the adapter was trained for as `base`",
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise AttnlmError(f"the adapters of {module.name} have NaN or infinite numbers", _COPY)
    return down, up


def _tensor(file: TensorFile, name: str) -> Tensor:
    if (kind := file.header.tensors[name].dtype) not in FLOATS:
        raise AttnlmError(f"the tensor {name} is of type {kind}, not of {', '.join(FLOATS)}", _HINT)
    try:
        return file.read(name).to(torch.float32)
    except (OSError, ValueError):
        raise AttnlmError(f"the tensor {name} can't be read", _COPY) from None


def _scale(config: Mapping[str, Any], module: Module, rank: int, path: Path) -> float:
    """What B A of a module is multiplied by."""
    alpha = _of_module(config, "alpha_pattern", module, config.get("lora_alpha", 8), path)
    stated = _of_module(config, "rank_pattern", module, config.get("r", 8), path)
    if stated != rank or not alpha > 0:
        raise AttnlmError(f"{path} does not fit the adapters of {module.name}", _COPY)
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _of_module(
    config: Mapping[str, Any], key: str, module: Module, default: Any, path: Path
) -> float:
    """As in peft: the keys are patterns for the end of a module's name."""
    patterns = config.get(key) or {}
    value = default
    if isinstance(patterns, dict):
        for end, given in patterns.items():
            plain = end if re.fullmatch(r"[\w.]+", end) else ""
            if not plain:
                raise AttnlmError(f"{path} has {quoted(key)} {quoted(end)}, no plain name", _HINT)
            if module.name == plain or module.name.endswith(f".{plain}"):
                value = given
                break
    if type(value) not in (int, float) or not abs(value) < _LARGEST_NUMBER:
        raise AttnlmError(f"{path} has {quoted(key)} {quoted(value)}, which is no number", _COPY)
    return float(value)
