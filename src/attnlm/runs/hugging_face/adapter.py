"""Adapters in the format of `peft`: adapter_config.json and adapter_model.safetensors.

Their modules are those of the stock class that the model is exported as. Where one holds several of
our maps, as GPT-2's c_attn holds query, key and value, the ranks of its parts are added up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.model.architecture import Architecture
from attnlm.model.sizes import LoRA, map_name, map_shapes
from attnlm.runs.hugging_face.stock_classes import StockClass, fitting_class
from attnlm.runs.run import Run
from attnlm.runs.safetensors_file import write_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_LAYER = re.compile(r".*\.\d+\.(.+)")


class Module(NamedTuple):
    """A linear map of a stock class, and the maps of ours that it holds, by outputs."""

    name: str
    maps: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Its name in every layer: `self_attn.q_proj`."""
        found = _LAYER.fullmatch(self.name)
        assert found is not None
        return found[1]


def modules(stock: StockClass, a: Architecture) -> Iterator[Module]:
    """The maps of all blocks of a stock class."""
    for stored in stock.stored(a):
        if stored.parts[0].startswith("blocks.") and stored.parts[0].endswith(".weight"):
            maps = tuple(part.removesuffix(".weight") for part in stored.parts)
            yield Module(stored.name.removesuffix(".weight"), maps)


def write_adapter(run: Run, adapters: Mapping[str, Tensor]) -> None:
    """Writes a run's adapters, by the names of their parameters, into run.adapter.

    Nothing is written of a run without them, and for a model without a stock class. Raises OSError.
    """
    a, lora = run.config.model, run.config.training.adapters
    stock = fitting_class(a)
    if lora is None or stock is None:
        return
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module in modules(stock, a):
        on = [path for path in module.maps if map_name(path) in lora.on]
        if on:
            down, up = (f"{PREFIX}{module.name}.lora_{x}.weight" for x in "AB")
            tensors[down] = torch.cat([adapters[f"{path}.lora_down"].cpu() for path in on])
            tensors[up] = _stacked_ups(module, adapters, a, lora)
            ranks[module.kind] = len(on) * lora.rank
    if run.adapter.is_symlink():
        run.adapter.unlink()  # nothing is written through a link
    run.adapter.mkdir(exist_ok=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = json.dumps(_config(run, lora, stock, ranks), indent=2) + "\n"
    files.write_bytes(run.adapter / CONFIG, config.encode())
    write_tensors(run.adapter / TENSORS, shapes, tensors.__getitem__)


def _stacked_ups(
    module: Module, adapters: Mapping[str, Tensor], a: Architecture, lora: LoRA
) -> Tensor:
    """Each B in the rows of its map, and in columns of its own."""
    shapes, blocks = map_shapes(a), []
    for path in module.maps:
        is_on = map_name(path) in lora.on
        outputs = shapes[map_name(path)][0]
        blocks.append(adapters[f"{path}.lora_up"].cpu() if is_on else torch.zeros(outputs, 0))
    stacked: Tensor = torch.block_diag(*blocks)
    return stacked


def _config(run: Run, lora: LoRA, stock: StockClass, ranks: Mapping[str, int]) -> dict[str, Any]:
    others = {kind: rank for kind, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.parent["name"] if run.parent is not None else None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {kind: lora.scale * rank for kind, rank in others.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": stock.model_type == "gpt2",
    }
