"""`attnlm compare`: is one group of runs better than another, or was it chance?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.cli import console, options
from attnlm.cli.options import (
    REQUIRED,
    argument,
    option,
    output,
    setting_text,
    shared,
    with_options,
)

_SHOWN = 40  # characters of a value
_FORMATS = (".html", ".png", ".svg", ".pdf", ".csv", ".tex")


@with_options(shared("checkpoint_dir"))
def compare(
    groups: list[str] = argument(
        REQUIRED,
        "GROUP …",
        "a run, a quoted pattern such as 'warm-*', names with commas, or a ladder",
        options.names("run", "ladder"),
    ),
    *,
    by: str | None = option(None, "a setting: runs with the same value of it are a group"),
    baseline: str | None = option(
        None, "the group to compare with each other one; default: each with each earlier one"
    ),
    measure: str = option(
        "loss", "what to compare: loss|accuracy", complete=options.words("loss", "accuracy")
    ),
    target: float | None = option(
        None, "a loss: is the mean of each group at most this, and when was it reached?"
    ),
    output: Path | None = output(
        "page, curves, table of runs or LaTeX table (.html .png .svg .pdf .csv .tex)", *_FORMATS
    ),
    json: bool,
    **folders: str,
) -> None:
    """Compare groups of runs: is one better, or was it the seed?

    Groups with the same seeds and batches are compared seed by seed, others by Welch's test. One
    run in each group shows the settings and results in which they differ.
    """
    found = attnlm.compare(
        *groups, by=by, baseline=baseline, measure=measure, target=target, **folders
    )
    facts = found.facts()
    if output is not None:
        files.write_bytes(output, found.written(output.suffix.lower().removeprefix(".")))
        facts["output"] = str(output)
    if json:
        console.print_json(facts)
        return
    names = [group.name for group in found.groups]
    for title in ("settings", "data", "results"):
        rows = [[key, *map(_value_text, row)] for key, row in getattr(found, title).items()]
        if rows:
            console.print_table([title, *names], rows, [title])
            console.print_result("")
    if not found.results:
        console.print_table(*found.group_table(), ["group"])
    if found.pairs:
        console.print_result("")
        console.print_table(*found.table(), ["group", "than", "verdict"])
    for note in found.notes:
        console.say(note)
    console.say(found.verdict)
    if output is not None:
        console.print_result(str(output))


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    text = "–" if value is None else setting_text(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
