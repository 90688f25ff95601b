"""`attnlm list`, `diff` and `doctor`: manage runs, data sets, recipes; check the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.folders import how_to_make
from attnlm.base.formatting import age, duration, quantity
from attnlm.base.suggestions import suggestion
from attnlm.cli import completion, console, options
from attnlm.cli.help import setting_text
from attnlm.cli.options import REQUIRED, argument
from attnlm.model.own_specs import CODE
from attnlm.runs.records import NOT_COMPARABLE

_SHOWN_OF_A_HASH = 12  # characters
_YOURS = ("runs", "datasets")
KINDS = (*_YOURS, "recipes")


def list_(
    kind: str | None = argument(
        None,
        "KIND",
        f"{'|'.join(KINDS)}; default: runs and datasets",
        completion.choice_completer(*KINDS),
    ),
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    data_dir: Path = options.DATA_DIR,
    json: bool = options.JSON,
) -> None:
    """List runs and data sets, newest first, or list recipes."""
    if kind is not None and kind not in KINDS:
        hint = suggestion(kind, KINDS, f"choose from {', '.join(KINDS)}")
        raise UsageError(f"invalid value for KIND: {kind!r}", hint)
    notes: list[object] = []
    list_functions: dict[str, Callable[[], Sequence[Any]]] = {
        "runs": lambda: attnlm.list_runs(checkpoint_dir, on_event=notes.append),
        "datasets": lambda: attnlm.list_datasets(data_dir, on_event=notes.append),
        "recipes": attnlm.list_recipes,
    }
    kinds = (KINDS if json else _YOURS) if kind is None else (kind,)
    listed = {name: list_functions[name]() for name in kinds}
    if json:
        console.print_json({name: [*map(asdict, entries)] for name, entries in listed.items()})
        return
    for name, parent in {"runs": checkpoint_dir, "datasets": data_dir}.items():
        if not listed.get(name, [True]):
            thing = "run" if name == "runs" else "data set"
            console.say(f"there is no {thing} in {parent} yet; {how_to_make(thing, parent)}")
    filled = {name: entries for name, entries in listed.items() if entries}
    for number, (name, entries) in enumerate(filled.items()):
        if number:
            console.print_result("")
        _print_entries(name, entries)
    for note in notes:
        console.say(str(note))


def _name_text(entry: attnlm.RunEntry | attnlm.DatasetEntry) -> str:
    mark = "*" if entry.is_latest else ""
    return f"{entry.name}{mark}" + (f" → {entry.link}" if entry.link is not None else "")


def _steps_text(entry: attnlm.RunEntry) -> str:
    """Return the steps of a run: `1,000`, or `400/1,000` if 600 steps are still to make."""
    if entry.steps is None or entry.step is None or entry.step == entry.steps:
        return _number_text(entry.step if entry.kind == "run" else entry.steps, ",")
    return f"{entry.step:,}/{entry.steps:,}"


def _number_text(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)


_PART, _LEAKS = "~", "!"
_SIZE_AND_AGE: Mapping[str, Callable[[Any], str]] = {
    "size": lambda entry: quantity(entry.bytes, "B") if entry.bytes else "",
    "age": lambda entry: age(time.time() - entry.modified) if entry.modified else "",
}
_COLUMNS: Mapping[str, Mapping[str, Callable[[Any], str | None]]] = {
    "runs": {
        "run": _name_text,
        "model": lambda run: run.model or (run.kind if run.kind != "run" else ""),
        "data": lambda run: run.dataset,
        "steps": _steps_text,
        "loss": lambda run: (
            (_LEAKS if run.leaks else "")
            + (_PART if run.evaluated_part else "")
            + _number_text(run.val_loss, ".4f")
        ),
        **_SIZE_AND_AGE,
        "parent": lambda run: f"from {run.imported_from}" if run.imported_from else run.parent,
    },
    "datasets": {
        "data set": _name_text,
        "source": lambda dataset: dataset.source,
        "tokenizer": lambda dataset: dataset.tokenizer,
        "ids": lambda dataset: _number_text(dataset.vocab_size, ","),
        "train": lambda dataset: quantity(dataset.train_tokens) if dataset.train_tokens else "",
        "validate": lambda dataset: quantity(dataset.val_tokens) if dataset.val_tokens else "",
        "split": lambda dataset: dataset.split or ("file" if dataset.val_tokens else ""),
        **_SIZE_AND_AGE,
    },
    "recipes": {
        "recipe": lambda recipe: recipe.name,
        "loss": lambda recipe: _number_text(recipe.val_loss, ".3f"),
        "time": lambda recipe: _time_text(recipe.seconds_range) if recipe.seconds_range else "",
        "purpose": lambda recipe: recipe.purpose,
    },
}
_TEXTS = (
    "run", "model", "data", "parent", "data set", "source", "tokenizer", "split",
    "recipe", "purpose",
)  # fmt: skip


def _print_entries(kind: str, entries: Sequence[Any]) -> None:
    """Print a table of runs, data sets or recipes, then notes about the entries."""
    columns = _COLUMNS[kind]
    rows = [[words(entry) or "" for words in columns.values()] for entry in entries]
    console.print_table(list(columns), rows, _TEXTS)
    if kind == "recipes":
        console.say(
            "losses are medians on Tiny Shakespeare and times are for two cores of a server CPU, "
            "if measured; R1 to R5 are the reference systems of docs/train.md"
        )
        console.say_next("attnlm train --recipe NAME")
        return
    if any(entry.is_latest for entry in entries):
        console.say(f"* used by commands when no {next(iter(columns))} is named")
    for entry in entries:
        if entry.problem is not None:
            console.say_styled("unreadable", "bold yellow", f"  {entry.name}: {entry.problem}")
    if kind == "runs" and any(entry.evaluated_part for entry in entries):
        console.say(
            f"{_PART} measured on a part of the validation split; attnlm eval measures all of it,"
            " up to its first 4,194,304 tokens"
        )
    if kind == "runs" and any(entry.leaks for entry in entries):
        console.say(f"{_LEAKS} {NOT_COMPARABLE}")
    for entry in entries:
        if kind == "runs" and entry.is_training:
            console.say(f"{entry.name} is being trained now")


def _time_text(seconds: tuple[float, float]) -> str:
    """Return a range of durations: `17.3 to 22.2 min`, or `2 s` if both bounds read the same."""
    shortest, longest = (duration(bound, 2) for bound in seconds)
    if shortest == longest:
        return shortest
    amount, unit = shortest.split()
    return f"{amount} to {longest}" if longest.endswith(unit) else f"{shortest} to {longest}"


# --- diff -----------------------------------------------------------------------------------------


def diff(
    a: str = argument(REQUIRED, "A", "name or path of a run", completion.runs),
    b: str = argument(REQUIRED, "B", "name or path of another run", completion.runs),
    checkpoint_dir: Path = options.CHECKPOINT_DIR,
    json: bool = options.JSON,
) -> None:
    """Show how two runs differ: settings, data, result."""
    diff = attnlm.diff_runs(a, b, checkpoint_dir=checkpoint_dir)
    parts = {"settings": diff.settings, "data": diff.data, "result": diff.result}
    if json:
        console.print_json({"a": diff.a.path, "b": diff.b.path, **parts, "warnings": diff.warnings})
        return
    for title, pairs in parts.items():
        if title != "settings":
            console.print_result("")
        if pairs:
            rows = [
                (key, *(_value_text(key, value) for value in pair)) for key, pair in pairs.items()
            ]
            console.print_table((title, diff.a.name, diff.b.name), rows, (title,))
        else:
            console.print_result(f"{title}: the same")
    for warning in diff.warnings:
        console.say_styled("not like for like:", "yellow", f" {warning}")


def _value_text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "seconds":
        return duration(value)
    if name in ("val_loss", "bits_per_byte", "bigram_loss"):
        return f"{value:.4f}"
    if name.endswith("sha256"):
        return f"{value[:_SHOWN_OF_A_HASH]}…"
    if name == CODE:
        hashes = (pair.rpartition(":") for pair in value.split())
        return " ".join(f"{file}:{sha256[:_SHOWN_OF_A_HASH]}…" for file, _, sha256 in hashes)
    if type(value) is int and name != "seed":
        return f"{value:,}"
    return setting_text(value)


# --- doctor ---------------------------------------------------------------------------------------


def doctor(json: bool = options.JSON) -> None:
    """Check this machine: versions, folders, devices, memory, kernels."""
    findings = console.collect_findings(attnlm.doctor(), show=not json)
    remedies = len([finding for finding in findings if finding.remedy])
    is_fatal = any(finding.is_fatal for finding in findings)
    if json:
        console.print_json({"findings": [asdict(finding) for finding in findings]})
    elif remedies:
        problems = f"{remedies} {'problem' if remedies == 1 else 'problems'} found"
        effect = "attnlm cannot train" if is_fatal else "attnlm still works"
        console.say(f"{problems} (see the → lines); {effect}")
    else:
        console.say("no problems found")
    if is_fatal:
        raise typer.Exit(1)
