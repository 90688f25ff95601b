"""`attnlm ladder`: train several models on the same batches, and compare them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import find_folder
from attnlm.cli import console, options
from attnlm.cli.compare import OUTPUT, show_tables
from attnlm.cli.event_printer import Display
from attnlm.cli.options import decode_argument, option, shared, switch, with_options
from attnlm.config.training import TrainingConfig
from attnlm.config.variants import variant
from attnlm.model.architecture import MODELS
from attnlm.runs.ladder_plan import EQUAL, REPAIR

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
        "number of seeds: each model is trained with all of them; 3 or more can tell a difference "
        "from chance; default: 1",
    ),
    tune: bool = switch(
        "first find the best of five learning rates for each model, by short trainings on a part "
        "of the training split",
        "--tune",
    ),
    equal: str | None = option(
        None,
        f"what to hold equal in all models: {'|'.join(EQUAL)}; the first model decides the "
        "widths or steps of the others; default: tokens",
        complete=options.words(*EQUAL),
    ),
    prompt: str | None = option(None, "text that each model continues"),
    tokens: int | None = option(None, "tokens that each model generates; default: 200"),
    baseline: str | None = option(
        None, "the model to compare with each other one; default: each with each earlier one"
    ),
    name: str | None = option(None, "name of the ladder; default: ladder-001, ladder-002, …"),
    resume: str | None = option(
        None, "name or path of a ladder to resume", complete=options.names("ladder")
    ),
    output: Path | None = OUTPUT,
    json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Train several models on the same batches and compare them."""
    for named in () if rungs is None else rungs.split(","):
        variant(named)  # before PyTorch is loaded
    if resume is None:
        find_folder(dataset, Path(settings["data_dir"]), kind="data set")

    with contextlib.closing(Display(quiet)) as display:
        found = attnlm.ladder(
            dataset,
            rungs=rungs,
            seeds=seeds,
            tune=tune or None,
            equal=equal,
            prompt=None if prompt is None else decode_argument(prompt, "--prompt"),
            tokens=tokens,
            baseline=baseline,
            name=name,
            resume=resume,
            on_event=display,
            **settings,
        )
    facts: dict[str, Any] = {"page": str(found.save(Path(found.path or "") / "index.html"))}
    if output is not None:
        facts["output"] = str(found.save(output))
    if not json:
        for rung in found.measured:
            console.say("", f"── {rung.name}", "cyan")
            prompt = "" if found.plan is None else found.plan.prompt
            console.say(f"{prompt}{rung.text}".replace("\n", "⏎"))
        console.say("")
    show_tables(found, sys.stderr)
    console.print_result_or_json("\n".join(facts.values()), found.facts() | facts, json)
    if failed := [group.name for group in found.groups if group.failed is not None]:
        of = f"{len(failed)} of {len(found.groups)} rungs failed"
        raise AttnlmError(f"{of}: {', '.join(failed)}", REPAIR)
