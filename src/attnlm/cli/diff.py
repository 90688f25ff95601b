"""`attnlm diff`: what differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlm.base.readable import duration
from attnlm.cli import completion, console
from attnlm.cli.help import in_words
from attnlm.cli.options import CheckpointDir, JsonOption
from attnlm.cli.tables import result_table

if TYPE_CHECKING:
    from attnlm.runs.diff import Pairs

_SHOWN_OF_A_HASH = 12  # characters


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="run, by name or path", autocompletion=completion.runs),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="another run", autocompletion=completion.runs)
    ],
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    json: JsonOption = False,
) -> None:
    """Show how two runs differ: settings, data, result."""
    from attnlm.runs.diff import diff_runs

    found = diff_runs(a, b, checkpoint_dir=checkpoint_dir)
    if json:
        console.result_json(
            {
                "a": str(found.a.path),
                "b": str(found.b.path),
                **{
                    part: {name: list(pair) for name, pair in getattr(found, part).items()}
                    for part in ("settings", "data", "result")
                },
                "warnings": list(found.warnings),
            }
        )
        return
    names = found.a.name, found.b.name
    for number, (title, pairs) in enumerate(
        {"settings": found.settings, "data": found.data, "result": found.result}.items()
    ):
        if number:
            console.result("")
        _show(title, names, pairs)
    for warning in found.warnings:
        console.say_styled("not like for like:", "yellow", f" {warning}")


def _show(title: str, names: tuple[str, str], pairs: Pairs) -> None:
    if not pairs:
        console.result(f"{title}: the same")
        return
    rows = [(name, *(_shown(name, value) for value in pair)) for name, pair in pairs.items()]
    result_table((title, *names), rows, (title,))


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "seconds":
        return duration(value)
    if name in ("val_loss", "bits_per_byte", "bigram_loss"):
        return f"{value:.4f}"
    if name.endswith("sha256"):
        return f"{value[:_SHOWN_OF_A_HASH]}…"
    if type(value) is int and name != "seed":
        return f"{value:,}"
    return in_words(value)
