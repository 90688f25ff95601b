"""`attnlm train`: train a model, with an option for every setting."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.folders import command_for, folder_flag
from attnlm.base.formatting import duration, quantity
from attnlm.cli import console, options
from attnlm.cli.event_printer import BEGINNING, Display, computation, counted, parts_in_words
from attnlm.cli.options import option, shared, switch, with_options
from attnlm.compute.processes import is_launched, is_main
from attnlm.config.recipes import recipe_names, to_toml
from attnlm.config.settings import RECORD_OF, resolve_new
from attnlm.model.architecture import RUNGS

_TOOLS = ("tensorboard", "wandb", "trackio")


@with_options(
    RECORD_OF | shared("checkpoint", "checkpoint_dir", "data_dir", "verify"),
    helps={
        "checkpoint": "which weights of the --from run: auto|best|last, or a step that was kept"
    },
    common=(
        "model", "embed_dim", "layers", "block_size", "heads", "dropout", "batch_size", "steps",
        "budget", "learning_rate", "seed", "recipe", "dry_run", "name", "resume", "start_from",
        "device", "json", "quiet",
    ),
)  # fmt: skip
def train(
    dataset: str | None,
    *,
    recipe: str | None = option(
        None,
        "settings from a recipe: its name, a TOML file, or a run's config.json; "
        "options override the recipe",
        complete=options.words(*recipe_names()),
    ),
    print_config: bool = switch("print the settings as a recipe, and exit", "--print-config"),
    dry_run: bool = switch(
        "print parameters, memory, FLOPs and the predicted time, and exit without training",
        "--dry-run",
    ),
    vocab_size: int | None = option(
        None, "size of the vocabulary, instead of a data set, with --dry-run"
    ),
    name: str | None,
    exist_ok: bool = switch(
        "take the run of that name if it has this configuration, and resume it if it is unfinished",
        "--exist-ok",
    ),
    set_: list[str] | None,
    force: bool = switch("train also a model that sees later tokens", "--force"),
    resume: str | None = option(
        None, "name or path of a run to resume", complete=options.names("run")
    ),
    start_from: str | None = option(
        None,
        "name or path of a run: the new run starts from its model and weights",
        "--from",
        complete=options.names("run"),
    ),
    log: str | None = option(
        None,
        f"tools to log to, separated by commas: {'|'.join(_TOOLS)}, or none; name them "
        "again to continue the log of a resumed run",
        complete=options.words(*_TOOLS, "none"),
    ),
    json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Train a model on prepared data.

    Losses are in nats per token: with a loss of x nats, the perplexity is e^x. Some defaults depend
    on the model: "64; 128 (gpt2)" means 128 for gpt2, and 64 for all others; "2 (gpt2)" means that
    the option applies to gpt2 only.
    """
    places = {name: settings.pop(name) for name in ("checkpoint_dir", "data_dir")}
    verify = settings.pop("verify")
    checkpoint = settings.pop("checkpoint")
    checkpoint_dir, data_dir = Path(places["checkpoint_dir"]), Path(places["data_dir"])
    settings = options.typed_settings(settings, set_)
    tools = [t.strip() for t in (log or "").split(",") if t.strip() not in ("", "none")]
    if tools:
        from attnlm.see.loggers import check_tools

        check_tools(tools)
    data: str | attnlm.Dataset | None = dataset
    parent: attnlm.Run | None = None
    count = 1
    if is_launched():
        # PyTorch logs a warning with its C++ stack for each failed attempt to connect.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        quiet = quiet or not is_main()
    elif resume is not None and not print_config:
        resumed = attnlm.open_run(resume, **places)
        if verify:
            resumed.open_dataset(verify=True)
        count = settings.get("processes", resumed.config.training.processes)
    else:  # errors are reported before torch is loaded
        if start_from is not None:
            parent = attnlm.open_run(start_from, checkpoint_dir=checkpoint_dir)
        request = resolve_new(settings, recipe, parent)
        if print_config:
            if len(request.sizes) > 1:
                raise UsageError(
                    f"the recipe {recipe} has {len(request.sizes)} sizes, and training chooses one",
                    "train with it first, then use the config.json of the run, which has one size",
                )
            console.print_result(to_toml(request.config.settings()).rstrip())
            return
        count = request.config.training.processes
        settings = {"request": request}
        if vocab_size is None:
            data = attnlm.open_dataset(dataset, data_dir=data_dir, verify=verify)
        if name is not None and not exist_ok:
            from attnlm.runs.create_run import check_name_is_free

            check_name_is_free(name, checkpoint_dir)
    settings |= {
        "recipe": recipe,
        "resume": resume,
        "start_from": parent or start_from,
        "force": force,
        **places,
    }
    if dry_run:
        if is_main():
            shown = Display(quiet)
            cost = attnlm.estimate(data, vocab_size=vocab_size, on_event=shown, **settings)
            _report_estimate(cost, json)
        return
    if vocab_size is not None:
        raise UsageError("`vocab_size` needs `dry_run`", "name a data set to train on")
    if count > 1:
        from attnlm.compute.launcher import run_processes

        raise typer.Exit(run_processes(count, sys.argv[1:]))

    with contextlib.closing(Display(quiet, tools)) as display:
        try:
            run = attnlm.train(
                data,
                checkpoint=checkpoint,
                name=name,
                exist_ok=exist_ok,
                log=tools,
                on_event=display,
                **settings,
            )
        except KeyboardInterrupt:
            display.close()
            _say_stopped(display.run, tools, quiet)
            raise
    if is_main():
        _report(run, json, quiet)
        if run.config.spec.name in RUNGS and not (recipe or resume or start_from or quiet):
            folders = [*folder_flag(data_dir, "data set"), *folder_flag(checkpoint_dir)]
            _say_next_model(run.config.spec.name, dataset, folders)


def _say_stopped(run: attnlm.Run | None, tools: Sequence[str], quiet: bool) -> None:
    """Say what an interrupted training saved, and how to resume it."""
    if run is not None and run.last.exists():
        step = run.checkpoint("last").step
        console.say(f"stopped; the last complete step, {step:,}, is saved in {run.path}")
        if not quiet:
            again = ["--log", ",".join(tools)] if tools else []
            console.say_next(command_for("attnlm train --resume", run.path, *again))
    elif is_main():
        console.say("stopped before the first step; nothing was saved")


def _say_next_model(model: str, dataset: str | None, folders: Sequence[str]) -> None:
    """Print the command that trains the model after `model` in the ladder."""
    arguments = ["attnlm", "train", *([] if dataset is None else [dataset])]
    if higher := RUNGS[RUNGS.index(model) + 1 :]:
        arguments += ["--model", higher[0]]
        purpose = "the next model of the ladder"
    else:
        arguments += ["--recipe", "best", "--budget", "2m"]
        purpose = "the best transformer for this text in two minutes"
    console.say_next(shlex.join([*arguments, *folders]), purpose)


def _report(run: attnlm.Run, json: bool, quiet: bool) -> None:
    from attnlm.runs.run import run_summary
    from attnlm.see.curves import verdict
    from attnlm.workflows.answers import format_of

    result = run.result()
    assert result is not None  # it is finished
    last = result.last
    outcome = {k: v for k, v in run_summary(run).items() if k not in BEGINNING}
    outcome["verdict"] = console.with_flags(verdict(run, result))
    outcome["time"] = f"{duration(last.seconds)}, {last.tokens:,} tokens"
    console.say_facts(outcome)
    if not quiet:
        length = ("--tokens", "500") if format_of(run) is None else ()
        console.say_next(command_for("attnlm sample", run.path, *length))
    facts = {
        "run": str(run.path),
        "dataset": run.dataset.path.removeprefix(f"{Path.cwd()}{os.sep}"),
        "model": run.config.spec.name,
        "parent": run.parent and asdict(run.parent),
        "parameters": run.parameters,
        **result.facts(),
        "evaluated_tokens": result.final.evaluated_tokens,
        "accuracy": result.final.accuracy,
        "tokens_per_second": last.tokens_per_second,
        "whole": {which: asdict(measured) for which, measured in result.whole.items()},
        "leaks": run.leaks or None,
    }
    console.print_result_or_json(str(run.path), facts, json)


def _report_estimate(estimate: attnlm.Estimate, json: bool) -> None:
    if json:
        console.print_json(estimate.facts())
        return
    config = estimate.config
    training = config.training
    steps = counted(estimate.steps, "step")
    lines = {
        "model": f"{config.spec.name}, {estimate.parameters:,} parameters: "
        f"{parts_in_words(config.spec)}, {estimate.vocab_size:,} ids",
        "batch": f"{training.batch_size:,} × {config.spec.block_size:,} = "
        f"{config.tokens_per_step:,} tokens a step",
        **computation(training, estimate.device, estimate.memory),
        "FLOPs": f"{quantity(estimate.step_flops, 'FLOP')} a step, "
        f"{quantity(estimate.flops, 'FLOP')} in all",
        "speed": f"{quantity(estimate.tokens_per_second)} tokens/s, measured on this machine",
        "time": f"{duration(estimate.seconds)} for {steps}, without evaluations and checkpoints",
    }
    for label, text in filter(all, lines.items()):
        console.print_result(f"{label:<8}{text}")
