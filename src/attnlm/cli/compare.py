"""`attnlm compare`: is one group of runs better than another, or was it chance?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import attnlm
from attnlm.cli import console, options
from attnlm.cli.options import (
    REQUIRED,
    argument,
    option,
    output,
    with_options,
)

if TYPE_CHECKING:
    from attnlm.see.comparison import Comparison

_FORMATS = (".html", ".png", ".svg", ".pdf", ".csv", ".tex")
OUTPUT = output(
    "page, curves, table of runs or LaTeX table (.html .png .svg .pdf .csv .tex)", *_FORMATS
)

BASELINE = option(
    None, "the group to compare with each other one; default: each with each earlier one"
)


@with_options(
    "checkpoint_dir",
    "data_dir",
    by=option(None, "a setting: runs with the same value of it are a group"),
    baseline=BASELINE,
    measure=option(
        "loss", "what to compare: loss|accuracy", complete=options.words("loss", "accuracy")
    ),
    target=option(
        None,
        "a loss: is the mean of each group at most this, and when was it reached?",
        type=float,
    ),
)
def compare(
    groups: list[str] = argument(
        REQUIRED,
        "GROUP …",
        "a run, a quoted pattern such as 'warm-*', names with commas, or a ladder",
        options.names("run", "ladder"),
    ),
    *,
    output: Path | None = OUTPUT,
    json: bool,
    **settings: Any,
) -> None:
    """Compare groups of runs: is one better, or was it the seed?

    Groups with the same seeds and batches are compared seed by seed, others by Welch's test. One
    run in each group shows the settings and results in which they differ.
    """
    found = attnlm.compare(*groups, **settings)
    facts = found.facts()
    if output is not None:
        facts["output"] = str(found.save(output))
    if json:
        console.print_json(facts)
        return
    if found.differences:
        console.print_table(*found.difference_table(), ["difference"])
        console.print_result("")
    show_tables(found, sys.stdout)
    if output is not None:
        console.print_result(str(output))


def show_tables(found: Comparison, stream: TextIO) -> None:
    """Print the tables of a comparison to a stream; on stderr, how to read them."""
    console.print_table(*found.table(), ["group"], stream)
    header, rows = found.pair_table()
    if rows:
        print(file=stream)
        console.print_table(header, rows, ["group", "than", "verdict"], stream)
    if found.references:
        baselines = ", ".join(f"{name} {loss:z.4f}" for name, loss in found.references.items())
        console.say(f"baselines: {baselines} nats per token")
    for sentence in found.notes:
        console.say(console.with_flags(sentence))
    for warning in found.warnings:
        console.say(f" {console.with_flags(warning)}", "not a fair comparison:", "yellow")
    console.say(found.verdict)
