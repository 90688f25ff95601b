"""`attnlm train`: train a model, with an option for every setting."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
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
from attnlm.cli.options import option, with_options
from attnlm.compute.processes import is_launched, is_main
from attnlm.config.recipes import recipe_names, to_toml
from attnlm.config.settings import RECORD_OF, Request, resolve_new
from attnlm.model.architecture import RUNGS

_OF_TRAINING = ("checkpoint", "name", "exist_ok", "log")  # without meaning for an estimate
_TOOLS = ("tensorboard", "wandb", "trackio")


@with_options(
    "checkpoint_dir",
    "data_dir",
    "verify",
    "set",
    "name",
    settings=RECORD_OF,
    helps={
        "budget": "time for the whole command, such as 90s, 5m or 1h30m, instead of `steps`; "
        "default: no limit",
    },
    common=(
        "model", "embed_dim", "layers", "block_size", "heads", "dropout", "batch_size", "steps",
        "budget", "learning_rate", "seed", "recipe", "dry_run", "name", "resume", "start_from",
        "device", "json", "quiet", "dataset",
    ),
    checkpoint=option(
        "auto",
        "which weights of the --from run: auto|best|last, or a step that was kept",
        complete=options.CHECKPOINTS,
    ),
    recipe=option(
        None,
        "settings from a recipe: its name, a TOML file, or a run's config.json; "
        "options override the recipe",
        complete=options.words(*recipe_names()),
    ),
    print_config=option(False, "print the settings as a recipe, and exit"),
    dry_run=option(
        False, "print parameters, memory, FLOPs and the predicted time, and exit without training"
    ),
    vocab_size=option(
        None, "size of the vocabulary, instead of a data set, with --dry-run", type=int
    ),
    exist_ok=option(
        False,
        "take the run of that name if it has this configuration, and resume it if it is unfinished",
    ),
    force=option(False, "train also a model that sees later tokens"),
    resume=option(None, "name or path of a run to resume", complete=options.names("run")),
    start_from=option(
        None,
        "name or path of a run: the new run starts from its model and weights",
        "--from",
        complete=options.names("run"),
    ),
    log=option(
        None,
        f"tools to log to, separated by commas: {'|'.join(_TOOLS)}; name them "
        "again to continue the log of a resumed run",
        complete=options.words(*_TOOLS),
    ),
)  # fmt: skip
def train(
    dataset: str | None,
    *,
    print_config: bool,
    dry_run: bool,
    vocab_size: int | None,
    json: bool,
    quiet: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Train a model on prepared data.

    Losses are in nats per token: with a loss of x nats, the perplexity is e^x. Some defaults depend
    on the model: "64; 128 (gpt2)" means 128 for gpt2, and 64 for all others; "2 (gpt2)" means that
    the option applies to gpt2 only.
    """
    typed = options.given({name: settings.pop(name) for name in (*RECORD_OF, "set")})
    verify = settings.pop("verify")
    if print_config:
        _print_config(_request(typed, settings), settings["recipe"])
        return
    count = 1
    if is_launched():
        # PyTorch logs a warning with its C++ stack for each failed attempt to connect.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    elif settings["resume"] is not None:
        resumed = options.opened_run(settings["resume"], {**settings})
        if verify:
            resumed.open_dataset(verify=True)
        count = typed.get("processes", resumed.config.training.processes)
    else:  # errors are reported before torch is loaded
        count = _request(typed, settings).config.training.processes
        if vocab_size is None:
            attnlm.open_dataset(dataset, data_dir=settings["data_dir"], verify=verify)
        if settings["name"] is not None and not settings["exist_ok"]:
            from attnlm.runs.create_run import check_name_is_free

            check_name_is_free(settings["name"], Path(settings["checkpoint_dir"]))
    if dry_run:
        typed |= {n: v for n, v in settings.items() if n not in _OF_TRAINING}
        if is_main():
            cost = attnlm.estimate(dataset, vocab_size=vocab_size, on_event=on_event, **typed)
            _report_estimate(cost, json)
        return
    if vocab_size is not None:
        raise UsageError("`vocab_size` needs `dry_run`", "name a data set to train on")
    if count > 1:
        from attnlm.compute.launcher import run_processes

        raise typer.Exit(run_processes(count, sys.argv[1:]))
    try:
        run = attnlm.train(dataset, on_event=on_event, **settings, **typed)
    except KeyboardInterrupt:
        _say_stopped(on_event, settings["log"])
        raise
    if is_main():
        _report(run, json, quiet)
        if not (quiet or settings["recipe"] or settings["resume"] or settings["start_from"]):
            _say_next_model(run)


def _request(typed: Mapping[str, Any], settings: Mapping[str, Any]) -> Request:
    """Return what is asked for, of a new run."""
    parent = None
    if settings["start_from"] is not None:
        parent = attnlm.open_run(settings["start_from"], checkpoint_dir=settings["checkpoint_dir"])
    return resolve_new(typed, settings["recipe"], parent)


def _print_config(request: Request, recipe: str | None) -> None:
    if len(request.sizes) > 1:
        raise UsageError(
            f"the recipe {recipe} has {len(request.sizes)} sizes, and training chooses one",
            "train with it first, then use the config.json of the run, which has one size",
        )
    console.print_result(to_toml(request.config.settings()).rstrip())


def _say_stopped(display: Display, log: str | None) -> None:
    """Say what an interrupted training saved, and how to resume it."""
    display.close()
    run = display.run
    if run is not None and run.last.exists():
        step = run.checkpoint("last").step
        console.say(f"stopped; the last complete step, {step:,}, is saved in {run.path}")
        if not display.quiet:
            again = ["--log", log] if log else []
            console.say_next(command_for("attnlm train --resume", run.path, *again))
    elif is_main():
        console.say("stopped before the first step; nothing was saved")


def _say_next_model(run: attnlm.Run) -> None:
    """Print the command that trains the model after the run's in the ladder."""
    if run.config.spec.name not in RUNGS:
        return
    if higher := RUNGS[RUNGS.index(run.config.spec.name) + 1 :]:
        flags, purpose = ["--model", higher[0]], "the next model of the ladder"
    else:
        flags = ["--recipe", "best", "--budget", "2m"]
        purpose = "the best transformer for this text in two minutes"
    flags += folder_flag(run.path.parent)
    dataset = Path(run.dataset.path)
    console.say_next(command_for("attnlm train", dataset, *flags, kind="data set"), purpose)


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
