"""`attnlm plan`: the cost of a training run before it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import find_folder
from attnlm.base.formatting import byte_size, duration, quantity
from attnlm.base.setting_fields import fields_of
from attnlm.cli import console, options
from attnlm.cli.event_printer import Display, division_in_words, parts_in_words
from attnlm.cli.options import option, with_options
from attnlm.compute.processes import is_launched, is_main
from attnlm.config.new_run import resolve_typed
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import Architecture

if TYPE_CHECKING:
    from attnlm.workflows.plan import Plan

_TRAINING = (
    "batch_size", "micro_batch_size", "optimizer",
    "recipe", "vocab_size", "start_from", "checkpoint_dir", "data_dir",
)  # fmt: skip
_WHERE = (
    "device", "dtype", "compile", "threads", "processes", "recompute",
    "peak", "share",
)  # fmt: skip
GROUPS = {
    "Model": [*fields_of(Architecture), "set_"],
    "Training": _TRAINING,
    "Device": _WHERE,
    "Budget": ("tokens", "steps"),
}
COMMON = (
    "model", "embed_dim", "layers", "block_size", "heads", "batch_size", "optimizer",
    "recipe", "vocab_size", "start_from", "device", "dtype", "processes", "peak", "share",
    "tokens", "steps",
)  # fmt: skip


@with_options(
    {
        name: record
        for name, record in RECORD_OF.items()
        if record is Architecture or name in (*_TRAINING, *_WHERE)
    }
)
def plan(
    dataset: str | None = options.DATASET,
    *,
    vocab_size: int | None = option(None, "size of the vocabulary, instead of a data set"),
    tokens: int | None = option(None, "tokens to train on; default: 20 per parameter"),
    steps: int | None = option(None, "steps to train for, instead of --tokens"),
    peak: float | None = option(
        None,
        "peak FLOP/s of the device of each process, such as 989e12; "
        "default: measure ten steps on this machine",
    ),
    set_: list[str] | None = options.SET,
    share: float | None = option(None, "fraction of the peak that training reaches; default: 0.4"),
    recipe: str | None = options.RECIPE,
    start_from: str | None = options.START_FROM,
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    json: bool = options.JSON,
    **settings: Any,
) -> None:
    """Show what a training run would cost: memory, FLOPs and time."""
    settings["steps"] = steps
    settings = options.typed_settings(settings, set_)
    parent = None
    if start_from is not None:
        parent = attnlm.open_run(start_from, checkpoint_dir=checkpoint_dir)
    config = resolve_typed(settings, {} if recipe is None else load_recipe(recipe), parent)
    if vocab_size is None:
        try:  # before torch is loaded
            find_folder(dataset, data_dir, kind="data set")
        except AttnlmError as error:
            raise AttnlmError(error.message, f"{error.hint}; or use `vocab_size`") from None
    if config.training.processes > 1 and peak is None and not is_launched():
        from attnlm.compute.launcher import run_processes

        raise typer.Exit(run_processes(config.training.processes, sys.argv[1:]))

    from attnlm.workflows.plan import plan as make_plan

    planned = make_plan(
        dataset,
        recipe=recipe,
        vocab_size=vocab_size,
        tokens=tokens,
        peak=peak,
        share=share,
        start_from=parent,
        data_dir=data_dir,
        on_event=Display(),
        **settings,
    )
    if not is_main():
        return
    if json:
        console.print_json(planned.facts())
        return
    for line in _plan_lines(planned):
        console.print_result(line)


def _plan_lines(planned: Plan) -> Iterator[str]:
    summary = {label: value for label, value in _cost_summary(planned).items() if value}
    width = max(map(len, summary))
    yield from (f"{label:<{width}}  {value}" for label, value in summary.items())
    yield ""
    memory = planned.memory
    parts = [(name, byte_size(size)) for name, size in asdict(memory).items() if size]
    title = "memory of each process" if planned.config.training.processes > 1 else "memory"
    rows = [*parts, ("total", byte_size(memory.total))]
    yield from console.table_lines((title, ""), rows, (title,))
    yield ""
    header = ("growth", "parameters", "FLOP/token", "memory", "tokens/s", "tokens", "time")
    grown = [
        (
            *(name, quantity(size.parameters), quantity(size.training_flops)),
            *(byte_size(size.memory.total), quantity(size.tokens_per_second)),
            *(quantity(size.tokens), duration(size.seconds)),
        )
        for name, size in [("as given", planned), *planned.grown()]
    ]
    yield from console.table_lines(header, grown, ("growth",))


def _cost_summary(planned: Plan) -> dict[str, str]:
    model = planned.config.spec
    training = planned.config.training
    update = ""
    if planned.update_flops:
        update = f"; update {quantity(planned.update_flops, 'FLOP')} a step ({training.optimizer})"
    amounts = {"PF-days": planned.pf_days, "device-hours": planned.device_hours}
    large = [
        f", {amount:{',.3g' if amount < 1000 else ',.0f'}} {unit}"
        for unit, amount in amounts.items()
        if amount >= 0.01
    ]
    return {
        "model": f"{model.name}, {planned.parameters:,} parameters, "
        f"{planned.parameters_without_embeddings:,} without embeddings: {parts_in_words(model)}, "
        f"{planned.vocab_size:,} ids",
        "batch": f"{training.batch_size:,} × {model.block_size:,} = "
        f"{planned.config.tokens_per_step:,} tokens a step, in "
        f"{division_in_words(training) or '1 process'}",
        "FLOPs": f"{quantity(planned.costs.forward_flops)} per token forward, "
        f"{quantity(planned.training_flops)} training{update}",
        "speed": f"{quantity(planned.tokens_per_second)} tokens/s: {_speed_source(planned)}",
        "budget": f"{planned.tokens:,} tokens, {planned.tokens / planned.parameters:.3g} per "
        f"parameter: {planned.steps:,} steps",
        "time": f"{duration(planned.seconds)}, without evaluations and checkpoints",
        "compute": quantity(planned.flops, "FLOP") + "".join(large),
    }


def _speed_source(planned: Plan) -> str:
    each = " in each process" if planned.config.training.processes > 1 else ""
    if planned.peak is not None and planned.share is not None:
        return f"{planned.share:.3g} of a stated peak of {quantity(planned.peak, 'FLOP/s')}{each}"
    training = planned.config.training
    reached = quantity(planned.flops_per_second, "FLOP/s")
    threads = f", threads {training.threads}" if planned.device == "cpu" else ""
    return f"measured, {reached}{each} ({planned.device}, {training.dtype}{threads})"
