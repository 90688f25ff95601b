"""`attnlm exam`: what can a part or a model do, task by task, beside the standard one?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.cli import console, options
from attnlm.cli.options import argument, option, with_options
from attnlm.runs.exam_plan import SUITE


@with_options(
    "part",
    "checkpoint_dir",
    tasks=option(None, f"some of {','.join(SUITE)}; default: all", complete=options.words(*SUITE)),
    seed=option(None, "the first of the seeds; default: 1", type=int),
    steps=option(None, "steps of each training; default: the task's", type=int),
    name=option(None, "name of the exam; default: exam-001, exam-002, …"),
    resume=option(None, "name or path of an exam to resume"),
)
def exam(
    candidate: str | None = argument(
        None, "CANDIDATE", "FILE.py:NAME, a head of `attnlm list heads`, or a variant"
    ),
    *,
    seeds: int | None = option(None, "trainings of each model for each task; default: 3", type=int),
    quick: bool = option(False, "one seed, which claims nothing"),
    output: Path | None = options.output("the card as a page (.html)", ".html"),
    json: bool,
    quiet: bool,
    on_event: Any,
    **settings: Any,
) -> None:
    """Examine an idea: train it and the standard model on tasks, and print what each can do."""
    seeds = 1 if quick else seeds
    card = attnlm.exam(candidate, seeds=seeds, on_event=on_event, **settings)
    if json:
        console.print_json({**card.facts(), **({"output": str(output)} if output else {})})
    else:
        console.print_table(*card.table(), ("task", "interval", "its interval", "verdict"))
        console.print_result("")
        console.print_table(*card.cost_table(), ["model"])
        console.print_result(f"longest context: {card.longest_context} tokens")
        for note in card.notes:
            console.say(note)
        console.print_result(card.verdict)
    if output is not None:
        card.save(output)
        if not json:
            console.print_result(str(output))
    if failed := [one.task for one in card.results if one.failed is not None]:
        hint = "read what each said above, repair the code, and start another exam"
        of = f"{len(failed)} of {len(card.results)} tasks failed"
        raise AttnlmError(f"{of}: {', '.join(failed)}", hint)
