"""`attnlm rm`: removes runs, after a question."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnlm.base.errors import UsageError
from attnlm.base.readable import quantity
from attnlm.cli import completion, console
from attnlm.cli.options import CheckpointDir, JsonOption

if TYPE_CHECKING:
    from attnlm.runs.list_runs import RunEntry


def rm(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="names or paths of runs or ladders",
            autocompletion=completion.removables,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="remove without a question")] = False,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    json: JsonOption = False,
) -> None:
    """Remove runs; asks first."""
    from attnlm.runs.list_runs import list_runs
    from attnlm.runs.remove import removable, removal_warnings, remove_run

    entries = list({(entry := removable(run, checkpoint_dir)).name: entry for run in runs}.values())
    going = {entry.name for entry in entries}
    others = [entry for entry in list_runs(checkpoint_dir) if entry.name not in going]
    for entry in entries:
        console.say(console.one_line(f"{entry.path}: {_in_words(entry)}"))
        for warning in removal_warnings(entry, others):
            console.say(f"  {console.one_line(warning)}")
    if not yes and not _agreed(len(entries)):
        console.say("nothing was removed")
        entries = []
    for entry in entries:
        remove_run(entry.path, checkpoint_dir=checkpoint_dir)
        if not json:
            console.result(f"removed {console.one_line(str(entry.path))}")
    if json:
        console.result_json({"removed": [str(entry.path) for entry in entries]})


def _in_words(entry: RunEntry) -> str:
    """`multi-head, 1,000 steps, loss 2.0713, 612 kB`."""
    facts = [
        entry.kind if entry.model is None else entry.model,
        f"{entry.step:,} steps" if entry.step is not None else "",
        f"loss {entry.val_loss:.4f}" if entry.val_loss is not None else "",
        f"imported from {entry.imported_from}" if entry.imported_from else "",
        quantity(entry.bytes, "B") if entry.bytes else "",
        "damaged" if entry.problem is not None else "",
    ]
    return ", ".join(filter(None, facts))


def _agreed(count: int) -> bool:
    """Whether the person at the keyboard says yes. Raises UsageError where there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("rm asks first, and there is no terminal to ask on", "give --yes")
    what = "it" if count == 1 else f"these {count}"
    print(f"remove {what} for good? [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201
    return sys.stdin.readline().strip().lower() in ("y", "yes")
