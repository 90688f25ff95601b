"""`attnlm ladder`: train several models on the same batches, and compare them."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import command_for, find_folder
from attnlm.cli import console, options
from attnlm.cli.event_printer import Display, baselines
from attnlm.cli.options import decode_argument, option, shared, with_options
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import MODELS
from attnlm.runs.ladder_plan import EQUAL, REPAIR, check_rungs

if TYPE_CHECKING:
    from attnlm.see.ladder import Ladder

_TRAINING = ("budget", "steps", "eval_every", "eval_tokens", "threads", "seed")


@with_options(
    dict.fromkeys(_TRAINING, TrainingConfig) | shared("checkpoint_dir", "data_dir"),
    helps={
        "budget": "time for all models together, such as 90s, 5m or 1h30m; default: 2m",
        "steps": "updates of each model, instead of --budget",
    },
)
def ladder(
    dataset: str | None,
    *,
    rungs: str | None = option(
        None,
        "models or variants to compare, in this order, such as bigram, "
        "transformer:positions=none or transformer:learning_rate=0.005; default: "
        "bigram,average,single-head,multi-head,transformer",
        complete=options.words(*MODELS),
    ),
    seeds: int | None = option(
        None,
        "number of seeds: each model is trained with all of them, and the median is shown; 3 or "
        "more can tell a difference from chance; default: 1",
    ),
    tune: str | None = option(
        None,
        "a number of the training, such as learning_rate, of which each model first gets its own "
        "best value, by short trainings on a part of the training split; default: no tuning",
    ),
    equal: str | None = option(
        None,
        f"what to hold equal in all models: {'|'.join(EQUAL)}; the first model decides the "
        "widths or steps of the others; default: tokens",
        complete=options.words(*EQUAL),
    ),
    prompt: str | None = option(None, "text that each model continues"),
    tokens: int | None = option(None, "tokens that each model generates; default: 200"),
    name: str | None = option(
        None, "name of the ladder; default: ladder-001, ladder-002, …; an existing one is resumed"
    ),
    resume: str | None = option(
        None, "name or path of a ladder to resume", complete=options.names("ladder")
    ),
    json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Train several models on the same batches and compare them."""
    if rungs is not None:
        check_rungs([rung.strip() for rung in rungs.split(",")])
    if resume is None:
        find_folder(dataset, Path(settings["data_dir"]), kind="data set")

    started: list[Path] = []
    with contextlib.closing(Display(quiet)) as display:

        def listen(event: object) -> None:
            if isinstance(event, attnlm.LadderStarted):
                started.append(event.path)
            display(event)

        try:
            ladder = attnlm.ladder(
                dataset,
                rungs=rungs,
                seeds=seeds,
                tune=tune,
                equal=equal,
                prompt=None if prompt is None else decode_argument(prompt, "--prompt"),
                tokens=tokens,
                name=name,
                resume=resume,
                on_event=listen,
                **settings,
            )
        except KeyboardInterrupt:
            display.close()
            if started:
                console.say(f"stopped; the models trained so far are saved next to {started[0]}")
                if not quiet:
                    console.say_next(command_for("attnlm ladder --resume", started[0]))
            raise
    page = ladder.write_page()
    if not json:
        say_texts(ladder)
    say_table(ladder)
    console.print_result_or_json(str(page), ladder_facts(ladder) | {"page": str(page)}, json)
    if failed := ladder.plan.failed:
        of = f"{len(failed)} of {len(ladder.plan.rungs)} rungs failed"
        raise AttnlmError(f"{of}: {', '.join(failed)}", REPAIR)


def say_texts(ladder: Ladder) -> None:
    """Print the text of each rung."""
    for rung in ladder.rungs:
        console.say("", f"── {rung.model}", "cyan")
        console.say(f"{ladder.plan.prompt}{rung.text}".replace("\n", "⏎"))
    console.say("")


def say_table(ladder: Ladder) -> None:
    """Print the comparison of the rungs, and what makes it unfair."""
    console.print_table(*ladder.table(), ("rung",), sys.stderr)
    header, rows = ladder.verdicts()
    if rows:
        console.say("")
        console.print_table(header, rows, ("rung", "than", "verdict"), sys.stderr)
    first = ladder.rungs[0]
    references = f"baselines: {baselines(first.run.vocab_size, first.run.dataset)}"
    if first.result.part:
        references += f", on the whole split; the rungs on {first.result.part}"
    console.say(references)
    for sentence in (ladder.certainty, ladder.equality, ladder.tuning):
        console.say(console.with_flags(sentence))
    for warning in map(console.with_flags, ladder.warnings):
        console.say(f" {warning}", "not a fair comparison:", "yellow")


def ladder_facts(ladder: Ladder) -> dict[str, Any]:
    """Return the results as JSON values."""
    plan = ladder.plan
    return {
        **asdict(plan),
        "ladder": str(ladder.path),
        "warnings": ladder.warnings,
        "pairs": [vars(pair) for pair in ladder.pairs],
        "rungs": [
            {
                "model": rung.model,
                "run": str(rung.run.path),
                **rung.result.facts(),
                "val_losses": {
                    plan.seed + number: result.final.val_loss
                    for number, result in enumerate(rung.results)
                },
                "mean": rung.mean,
                "interval": rung.interval,
                "gain": gain and gain.nats,
                "accuracy": rung.result.final.accuracy,
                "parameters": rung.run.parameters,
                "flops": rung.flops,
                "text": plan.prompt + rung.text,
            }
            for rung, gain in zip(ladder.rungs, ladder.gains, strict=True)
        ],
    }
