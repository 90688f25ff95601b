"""The settings of low-rank adapters: what they need of a model, and what they exclude."""

from __future__ import annotations

from dataclasses import replace

from attnlm.base.errors import UsageError
from attnlm.base.settings import quoted
from attnlm.base.suggestions import suggestion
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import Architecture
from attnlm.model.low_rank import MAP_NAMES, map_shapes

ADAPTERS_RATE = 0.001
"""The learning rate of adapters: they are trained by AdamW, whatever the model was trained by."""


def with_adapters(model: Architecture, training: TrainingConfig) -> TrainingConfig:
    """The training with all that is said of its adapters. Raises UsageError for what can't be."""
    if training.lora is None:
        for name in ("lora_alpha", "lora_on"):
            if getattr(training, name) is not None:
                raise UsageError(f"`{name}` has no effect without `lora`", f"leave `{name}` out")
        return training
    there = tuple(map_shapes(model))
    if not there:
        raise UsageError(
            f"`lora` adapts the maps of a model's blocks, and {model.model} has none",
            "leave `lora` out",
        )
    for name, excluded in {
        "`shard`": training.shard,
        "`compile` on": training.compile == "on",
        "`optimizer` muon": training.optimizer == "muon",
    }.items():
        if excluded:
            raise UsageError(f"{name} can't be combined with `lora`", "leave one of them out")
    on = training.lora_on or ("query,value" if "query" in there else "up,down")
    alpha = training.lora_alpha or 2.0 * training.lora
    return replace(training, lora_alpha=alpha, lora_on=",".join(_maps(on, there, model.model)))


def _maps(on: str, there: tuple[str, ...], model: str) -> tuple[str, ...]:
    """The maps that were named, in the order in which a block computes them."""
    named = there if on == "all" else tuple(name.strip() for name in on.split(","))
    for name in named:
        if name not in MAP_NAMES:
            hint = suggestion(name, MAP_NAMES, f"choose from {', '.join(there)}, or all")
            raise UsageError(f"`lora_on` can't be {quoted(name)}", hint)
        if name not in there:
            several = f", or several of {', '.join(there)}"
            raise UsageError(
                f"`lora_on` {name}: this {model} has no such map",
                f"give `lora_on` {there[0]}{several}",
            )
    return tuple(name for name in there if name in named)


def check_from_a_run(training: TrainingConfig) -> None:
    """Raises UsageError for adapters of weights that nobody has trained."""
    if training.lora is not None:
        raise UsageError(
            "`lora` needs an existing run to adapt",
            "name it with `start_from`, or leave `lora` out",
        )
