"""`attnlm rm`: removes runs, after a question."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnlm.base.errors import AttnlmError, UsageError
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="delete without asking")] = False,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    json: JsonOption = False,
) -> None:
    """Delete runs, after asking."""
    from attnlm.runs.list_runs import list_runs
    from attnlm.runs.remove import removal_warnings, remove_run

    entries = list(
        {(entry := _removable(run, checkpoint_dir)).name: entry for run in runs}.values()
    )
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


def _removable(run: str, checkpoint_dir: Path) -> RunEntry:
    """As `removable`, which does not know data sets by name."""
    from attnlm.runs.remove import removable

    try:
        return removable(run, checkpoint_dir)
    except AttnlmError:
        for path in (Path(run), Path("data", run)):
            if os.path.lexists(path / "meta.json"):
                hint = f"delete its folder: {shlex.join(['rm', '-r', str(path)])}"
                raise AttnlmError(f"{path} is a data set, and rm removes runs", hint) from None
        raise


def _in_words(entry: RunEntry) -> str:
    """`multi-head, 1,000 steps, loss 2.0713, 612 kB`."""
    part = f" on {entry.evaluated_part}" if entry.evaluated_part else ""
    facts = [
        entry.kind if entry.model is None else entry.model,
        f"{entry.step:,} steps" if entry.step is not None else "",
        f"loss {entry.val_loss:.4f}{part}" if entry.val_loss is not None else "",
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
