"""`attnlm list`: runs, data sets and recipes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnlm.base.errors import UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.folders import how_to_make
from attnlm.base.readable import age, duration, quantity
from attnlm.base.suggestions import suggestion
from attnlm.cli import completion, console
from attnlm.cli.options import CheckpointDir, DataDir, JsonOption
from attnlm.cli.tables import result_table

if TYPE_CHECKING:
    from attnlm.config.recipes import RecipeEntry
    from attnlm.data.list_datasets import DatasetEntry
    from attnlm.runs.list_runs import RunEntry

_YOURS = ("runs", "datasets")
KINDS = (*_YOURS, "recipes")


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help=f"{'|'.join(KINDS)}; default: runs and datasets",
            autocompletion=completion.choices(*KINDS),
        ),
    ] = None,
    checkpoint_dir: CheckpointDir = Path("checkpoints"),
    data_dir: DataDir = Path("data"),
    json: JsonOption = False,
) -> None:
    """List runs and data sets, the newest first, or recipes."""
    if kind is not None and kind not in KINDS:
        hint = suggestion(kind, KINDS, f"choose from {', '.join(KINDS)}")
        raise UsageError(f"KIND can't be {kind!r}", hint)
    notes: list[object] = []
    found = {
        one: _found(one, checkpoint_dir, data_dir, notes.append)
        for one in ((KINDS if json else _YOURS) if kind is None else (kind,))
    }
    if json:
        console.result_json(
            {one: [_facts(entry) for entry in entries] for one, entries in found.items()}
        )
        return
    for name, parent in {"runs": checkpoint_dir, "datasets": data_dir}.items():
        if not found.get(name, [True]):
            what = "run" if name == "runs" else "data set"
            console.say(f"there is no {what} in {parent} yet; {how_to_make(what, parent)}")
    filled = {one: entries for one, entries in found.items() if entries}
    for number, (one, entries) in enumerate(filled.items()):
        if number:
            console.result("")
        _SHOWN[one](entries)
    for note in notes:
        if isinstance(note, Note):
            console.say(console.one_line(note.text))


def _found(kind: str, checkpoint_dir: Path, data_dir: Path, on_event: OnEvent) -> Sequence[Any]:
    if kind == "recipes":
        from attnlm.config.recipes import list_recipes

        return list_recipes()
    if kind == "datasets":
        from attnlm.data.list_datasets import list_datasets

        return list_datasets(data_dir, on_event=on_event)
    from attnlm.runs.list_runs import list_runs

    return list_runs(checkpoint_dir, on_event=on_event)


def _facts(entry: Any) -> dict[str, Any]:
    facts = asdict(entry)
    return {**facts, "path": str(entry.path)} if "path" in facts else facts


def _show_runs(entries: Sequence[RunEntry]) -> None:
    header = ("run", "model", "data", "steps", "loss", "size", "age", "parent")
    rows = [
        (
            *(_name(entry), entry.model or (entry.kind if entry.kind != "run" else "")),
            *(entry.dataset or "", _steps(entry), _loss(entry), *_size_and_age(entry)),
            f"from {entry.imported_from}" if entry.imported_from else entry.parent or "",
        )
        for entry in entries
    ]
    _show(header, rows, ("run", "model", "data", "parent"), entries)
    if any(_loss(entry).startswith(_PART) for entry in entries):
        console.say(
            f"{_PART} on a part of the validation split; attnlm eval takes all of it,"
            " or its first 4,194,304 tokens"
        )
    for entry in entries:
        if entry.is_training:
            console.say(f"{console.one_line(entry.name)} is being trained now")


def _steps(entry: RunEntry) -> str:
    """`1,000`, or `400/1,000` where the others were not made."""
    if entry.steps is None or entry.step is None or entry.step == entry.steps:
        known = entry.step if entry.kind == "run" else entry.steps
        return "" if known is None else f"{known:,}"
    return f"{entry.step:,}/{entry.steps:,}"


def _show_datasets(entries: Sequence[DatasetEntry]) -> None:
    header = ("data set", "source", "tokenizer", "ids", "train", "validate", "size", "age")
    rows = [
        (
            *(_name(entry), entry.source or "", entry.tokenizer or ""),
            *(_count(entry.vocab_size), _amount(entry.train_tokens), _amount(entry.val_tokens)),
            *_size_and_age(entry),
        )
        for entry in entries
    ]
    _show(header, rows, ("data set", "source", "tokenizer"), entries)


def _show_recipes(entries: Sequence[RecipeEntry]) -> None:
    header = ("recipe", "loss", "time", "purpose")
    rows = [
        (entry.name, _measured(entry.val_loss), _time(entry.seconds_range), entry.purpose)
        for entry in entries
    ]
    result_table(header, rows, ("recipe", "purpose"))
    console.say(
        "median losses on Tiny Shakespeare, times on two cores of a server CPU, where measured; "
        "R1 to R5 are the reference systems of docs/train.md"
    )
    console.say_next("attnlm train --recipe NAME")


_SHOWN: Mapping[str, Any] = {
    "runs": _show_runs,
    "datasets": _show_datasets,
    "recipes": _show_recipes,
}


def _show(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Sequence[str],
    entries: Sequence[RunEntry | DatasetEntry],
) -> None:
    result_table(header, rows, texts)
    if any(entry.is_latest for entry in entries):
        console.say(f"* what commands take when no {header[0]} is named")
    for entry in entries:
        if entry.problem is not None:
            told = console.one_line(f"  {entry.name}: {entry.problem}")
            console.say_styled("damaged", "bold yellow", told)


def _name(entry: RunEntry | DatasetEntry) -> str:
    mark = "*" if entry.is_latest else ""
    return f"{entry.name}{mark}" + (f" → {entry.link}" if entry.link is not None else "")


def _size_and_age(entry: RunEntry | DatasetEntry) -> tuple[str, str]:
    return (
        quantity(entry.bytes, "B") if entry.bytes else "",
        age(time.time() - entry.modified) if entry.modified else "",
    )


_PART = "~"


def _loss(entry: RunEntry) -> str:
    mark = _PART if entry.evaluated_part else ""
    return "" if entry.val_loss is None else f"{mark}{entry.val_loss:.4f}"


def _measured(loss: float | None) -> str:
    """To as many digits as docs/train.md has."""
    return "" if loss is None else f"{loss:.3f}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _amount(number: int | None) -> str:
    return "" if number is None else quantity(number)


def _time(seconds: tuple[float, float] | None) -> str:
    """`2 s`, or `17.3 to 22.2 min`."""
    if seconds is None:
        return ""
    shortest, longest = (duration(bound, 2) for bound in seconds)
    if shortest == longest:
        return shortest
    amount, unit = shortest.split()
    return f"{amount} to {longest}" if longest.endswith(unit) else f"{shortest} to {longest}"
