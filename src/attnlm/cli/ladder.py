"""`attnlm ladder`: train several models on the same batches, and compare them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import find_folder
from attnlm.cli import console, options
from attnlm.cli.compare import BASELINE, OUTPUT, show_tables
from attnlm.cli.options import option, with_options
from attnlm.config.variants import variant
from attnlm.model.architecture import MODELS
from attnlm.runs.ladder_plan import REPAIR, SETTINGS


@with_options(
    "checkpoint_dir",
    "data_dir",
    settings=SETTINGS,
    helps={
        "budget": "time for all models together, such as 90s, 5m or 1h30m; default: 2m",
        "steps": "updates of each model, instead of --budget",
    },
    baseline=BASELINE,
    name=option(None, "name of the ladder; default: ladder-001, ladder-002, …"),
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
    resume: str | None = option(
        None, "name or path of a ladder to resume", complete=options.names("ladder")
    ),
    output: Path | None = OUTPUT,
    json: bool,
    quiet: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Train several models on the same batches and compare them."""
    for named in () if rungs is None else rungs.split(","):
        variant(named)  # before PyTorch is loaded
    if resume is None:
        find_folder(dataset, Path(settings["data_dir"]), kind="data set")

    found = attnlm.ladder(dataset, rungs=rungs, resume=resume, on_event=on_event, **settings)
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
