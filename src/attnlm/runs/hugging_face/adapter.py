"""Write and read adapters in the format of `peft`: adapter_config.json and
adapter_model.safetensors.

The modules have the names of the stock class: the class of `transformers` that the model is
exported as. A module may hold several of our linear layers; its rank is then the sum of their
ranks. For example, GPT-2's c_attn holds query, key and value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.setting_fields import Settings, quoted
from attnlm.config.settings import resolve
from attnlm.model.architecture import Architecture, require_architecture
from attnlm.model.linear_maps import LoRA, map_name, map_shapes
from attnlm.model.spec import Use
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import create_run_folder
from attnlm.runs.external_formats import STOCK_CLASSES, StockClass, choose_class, fitting_class
from attnlm.runs.hugging_face.read_model import (
    check_options,
    check_type,
    open_tensors,
)
from attnlm.runs.load_model import parent_record, write_base
from attnlm.runs.records import CheckpointFacts, DatasetFacts
from attnlm.runs.run import Run, open_run
from attnlm.runs.safetensors_file import TensorFile, write_tensors

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HINT = "save a plain LoRA adapter with peft: no biases, no other modules, weights not decomposed"
_COPY = "copy the folder again from its source"
_LARGEST_NUMBER = 1e9
# Keys about training, or about how an adapter is loaded; only the last line's are used below.
_ANY_VALUE = (
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "target_modules", "fan_in_fan_out", "auto_mapping", "peft_version", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "runtime_config", "qalora_group_size",
    "layers_to_transform", "layers_pattern", "exclude_modules", "ensure_weight_tying",
    "r", "lora_alpha", "rank_pattern", "alpha_pattern",
)  # fmt: skip
_ALLOWED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ANY_VALUE, ()),
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (True, False, None),
    # Other values change the base weights.
    "init_lora_weights": (True, False, "gaussian", None),
}
_OFF: tuple[Any, ...] = (None, False, 0, [], {})


class _Module(NamedTuple):
    """A linear layer of a `transformers` model, such as `c_attn`. Its outputs are those of the
    layers of our model named in `maps`, concatenated in this order."""

    name: str
    maps: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of the LoRA matrices A and B in a file of `peft`."""
        down, up = (f"{_PREFIX}{self.name}.lora_{x}.weight" for x in "AB")
        return down, up


def _modules(stock: StockClass, a: Architecture) -> Iterator[_Module]:
    """Yield the linear layers of all blocks."""
    shapes = map_shapes(a)
    for mapping in stock.tensor_mappings(a):
        maps = tuple(name.removesuffix(".weight") for name in mapping.parameters)
        if all(map_name(path) in shapes for path in maps):
            yield _Module(mapping.name.removesuffix(".weight"), maps)


# --- Writing --------------------------------------------------------------------------------------


def write_adapter(run: Run, adapters: Mapping[str, Tensor]) -> None:
    """Write adapters, keyed by our names of their parameters, to the folder `run.adapter`.

    Write nothing if the run has no adapters, or if no stock class can express its model.
    """
    lora = run.config.training.adapters
    a = run.config.spec
    if lora is None or not isinstance(a, Architecture) or (stock := fitting_class(a)) is None:
        return
    shapes = map_shapes(a)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module in _modules(stock, a):
        adapted = [path for path in module.maps if map_name(path) in lora.on]
        if adapted:
            down, up = module.tensors
            tensors[down] = torch.cat([adapters[f"{path}.lora_down"].cpu() for path in adapted])
            # Block-diagonal: each B has the rows of its own layer, and separate columns.
            tensors[up] = torch.block_diag(
                *(
                    adapters[f"{path}.lora_up"].cpu()
                    if path in adapted
                    else torch.zeros(shapes[map_name(path)][0], 0)
                    for path in module.maps
                )
            )
            kind = re.sub(r".*\.\d+\.", "", module.name)  # without the block: self_attn.q_proj
            ranks[kind] = len(adapted) * lora.rank
    other_ranks = {kind: rank for kind, rank in ranks.items() if rank != lora.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.parent.name if run.parent is not None else None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": other_ranks,
        "alpha_pattern": {kind: lora.scale * rank for kind, rank in other_ranks.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": stock.transposes,
    }
    if run.adapter.is_symlink():
        run.adapter.unlink()  # never write through a link
    run.adapter.mkdir(exist_ok=True)
    files.write_bytes(run.adapter / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_tensors(run.adapter / _TENSORS, sizes, tensors.__getitem__)


# --- Reading --------------------------------------------------------------------------------------


def is_adapter(source: Path) -> bool:
    """Return True if the folder `source` has an adapter of `peft`."""
    return (source / _CONFIG).is_file()


def import_adapter(
    folder: Path, base: str | Path | Run, *, name: str | None, checkpoint_dir: Path
) -> Run:
    """Create a run from the adapter in `folder`, which was trained for the weights of `base`."""
    parent = open_run(base, checkpoint_dir=checkpoint_dir)
    a = require_architecture(parent.config.spec, Use.EXPORT)
    lora, tensors = _read_adapter(folder, a, choose_class(a, STOCK_CLASSES, parent.name))
    training: Settings = {"steps": 1, "lora": lora.rank, "lora_alpha": lora.alpha}
    try:
        config = resolve({**a.settings(), **training, "lora_on": ",".join(lora.on)})
    except UsageError as error:
        raise AttnlmError(f"{folder}: {error.message}", error.hint) from None
    record = parent_record(parent, "auto")
    run = Run(
        Path(),
        config,
        vocab_size=parent.vocab_size,
        parameters=parent.parameters,
        dataset=DatasetFacts(name=folder.absolute().name),
        parent=record,
        imported_from=str(folder.absolute()),
    )

    def add_weights(run: Run) -> Run:
        run = write_base(run, record)
        save_checkpoint(run.best, tensors, CheckpointFacts(step=0).content())
        write_adapter(run, tensors)
        return run

    return create_run_folder(run, parent.tokenizer, name, checkpoint_dir, add_weights)


def _read_adapter(
    folder: Path, a: Architecture, stock: StockClass
) -> tuple[LoRA, dict[str, Tensor]]:
    """Return the LoRA settings and the adapters, keyed by our names, of a folder of `peft`.

    Our settings have one rank and one alpha: matrices of lower rank are padded with zeros, and B is
    rescaled if alpha / rank differs between modules.
    """
    path = folder / _CONFIG
    config = files.json_object(path)
    check_options(path, config, _ALLOWED, _HINT, _OFF)
    with open_tensors(folder / _TENSORS) as file:
        names = file.tensors.keys()
        modules = [module for module in _modules(stock, a) if not names.isdisjoint(module.tensors)]
        for name in sorted(names - {name for module in modules for name in module.tensors}):
            raise AttnlmError(f"the tensor {quoted(name)} is not an adapter of {stock.name}", _HINT)
        if not modules:
            raise AttnlmError(f"{folder / _TENSORS} has no adapters of {stock.name}", _COPY)
        pairs = {module: _read_pair(file, module, a) for module in modules}
    scales = {
        module: _lora_scale(config, module, len(down), path) for module, (down, _) in pairs.items()
    }
    on = {map_name(linear_map) for module in modules for linear_map in module.maps}
    shapes = map_shapes(a)
    rank = max(len(down) for down, _ in pairs.values())
    scale = scales[modules[0]]
    lora = LoRA(rank, scale * rank, tuple(name for name in shapes if name in on))
    tensors = {
        name: torch.zeros(shape)
        for name, shape in a.costs(vocab_size=0).adapter_shapes(lora).items()
    }
    for module, (down, up) in pairs.items():
        outputs = [shapes[map_name(linear_map)][0] for linear_map in module.maps]
        for linear_map, rows in zip(module.maps, up.split(outputs), strict=True):
            tensors[f"{linear_map}.lora_down"][: len(down)] = down
            tensors[f"{linear_map}.lora_up"][:, : len(down)] = rows * (scales[module] / scale)
    return lora, tensors


def _read_pair(file: TensorFile, module: _Module, a: Architecture) -> tuple[Tensor, Tensor]:
    """Return a module's A (rank, inputs) and B (outputs, rank)."""
    for name in module.tensors:
        if name not in file.tensors:
            raise AttnlmError(f"{module.name} lacks {name}; an adapter needs both matrices", _COPY)
        check_type(name, file.tensors[name].dtype, _HINT)
    down, up = (file.read(name).to(torch.float32) for name in module.tensors)
    shapes = [map_shapes(a)[map_name(path)] for path in module.maps]
    rank = len(down) if down.ndim else 0
    outputs = sum(shape[0] for shape in shapes)
    inputs = shapes[0][1]
    if not rank or (down.shape, up.shape) != ((rank, inputs), (outputs, rank)):
        raise AttnlmError(
            f"the adapters of {module.name} have shapes {tuple(down.shape)} and {tuple(up.shape)}, "
            f"but the projection has ({outputs}, {inputs})",
            "as `base`, use the run for which the adapter was trained",
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise AttnlmError(f"the adapters of {module.name} have NaN or infinite values", _COPY)
    return down, up


def _lora_scale(config: Mapping[str, Any], module: _Module, rank: int, path: Path) -> float:
    """Return the factor by which a module's product B A is scaled."""
    alpha = _pattern_value(config, "alpha_pattern", module, "lora_alpha", path)
    declared_rank = _pattern_value(config, "rank_pattern", module, "r", path)
    targets = config.get("target_modules")
    is_target = not isinstance(targets, list) or any(_is_suffix(end, module) for end in targets)
    if declared_rank != rank or not alpha > 0 or not is_target:
        raise AttnlmError(f"{path} does not fit the adapters of {module.name}", _COPY)
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _pattern_value(
    config: Mapping[str, Any], patterns: str, module: _Module, key: str, path: Path
) -> float:
    """Return a module's rank or alpha in adapter_config.json, by the rules of peft.

    `config[patterns]` maps the ends of module names to values. For a module with another name, the
    value is `config[key]`.
    """
    table = config.get(patterns) or {}
    if not isinstance(table, dict) or not all(re.fullmatch(r"[\w.]+", end) for end in table):
        raise AttnlmError(
            f"{path} has {quoted(patterns)} {quoted(table)}, not a table of modules", _HINT
        )
    values = [value for end, value in table.items() if _is_suffix(end, module)]
    value = [*values, config.get(key, 8)][0]
    if type(value) not in (int, float) or not abs(value) < _LARGEST_NUMBER:
        key = patterns if values else key
        raise AttnlmError(f"{path} has {quoted(key)} {quoted(value)}, which is not a number", _COPY)
    return float(value)


def _is_suffix(end: object, module: _Module) -> bool:
    return f".{module.name}".endswith(f".{end}")
