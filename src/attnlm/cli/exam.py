"""`attnlm exam`: what can a part or a model do, task by task, beside the standard one?"""

from __future__ import annotations

import contextlib
from typing import Any

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.formatting import quantity
from attnlm.cli import console, options
from attnlm.cli.event_printer import Display
from attnlm.cli.options import argument, option, shared, switch, with_options
from attnlm.runs.exam_plan import SUITE


@with_options(shared("checkpoint_dir"))
def exam(
    candidate: str | None = argument(
        None, "CANDIDATE", "FILE.py:NAME, a head of `attnlm list heads`, or a variant"
    ),
    *,
    part: str | None = option(
        None,
        "what own code is: attention|mlp|scores|model; default: as its arguments tell",
        complete=options.words("attention", "mlp", "scores", "model"),
    ),
    tasks: str | None = option(
        None, f"some of {','.join(SUITE)}; default: all", complete=options.words(*SUITE)
    ),
    seeds: int = option(3, "trainings of each model for each task", min=1),
    seed: int = option(1, "the first of the seeds"),
    quick: bool = switch("one seed, which claims nothing", "--quick"),
    name: str | None = option(None, "name of the exam; default: exam-001, exam-002, …"),
    resume: str | None = option(None, "name or path of an exam to resume"),
    json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Examine an idea: train it and the standard model on tasks, and print what each can do."""
    with contextlib.closing(Display(quiet)) as display:
        card = attnlm.exam(
            candidate,
            part=part,
            tasks=tasks,
            seeds=1 if quick else seeds,
            seed=seed,
            name=name,
            resume=resume,
            on_event=display,
            **settings,
        )
    if json:
        console.print_json(card.facts())
    else:
        console.print_table(*card.table(), ("task", "interval", "its interval", "verdict"))
        for side, cost in card.costs().items():
            flops = quantity(cost["flops"], "FLOP")
            figures = f"{cost['parameters']:,} parameters, {flops}, {cost['seconds']:.0f} s"
            console.print_result(f"{side}: {figures}")
        console.print_result(card.verdict)
    if failed := [one.task for one in card.results if one.failed is not None]:
        hint = "read what each said above, repair the code, and start another exam"
        of = f"{len(failed)} of {len(card.results)} tasks failed"
        raise AttnlmError(f"{of}: {', '.join(failed)}", hint)
