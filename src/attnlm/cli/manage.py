"""`attnlm list`, `check` and `doctor`: what there is, and what holds for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.folders import how_to_make
from attnlm.base.formatting import duration, quantity
from attnlm.base.suggestions import suggestion
from attnlm.cli import console, options
from attnlm.cli.options import REQUIRED, argument, option, with_options
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import Architecture
from attnlm.runs.records import NOT_COMPARABLE

if TYPE_CHECKING:
    from attnlm.workflows.doctor import Finding

KINDS = ("runs", "datasets", "recipes", "heads")


@with_options()
def list_(
    kind: str | None = argument(
        None, "KIND", f"{'|'.join(KINDS)}; default: runs and datasets", options.words(*KINDS)
    ),
    *,
    checkpoint_dir: str,
    data_dir: str,
    json: bool,
) -> None:
    """List runs and data sets, newest first, or list recipes or the library of heads."""
    if kind is not None and kind not in KINDS:
        hint = suggestion(kind, KINDS, f"choose from {', '.join(KINDS)}")
        raise UsageError(f"invalid value for KIND: {kind!r}", hint)
    notes: list[object] = []
    list_functions: dict[str, Callable[[], Sequence[Any]]] = {
        "runs": lambda: attnlm.list_runs(checkpoint_dir, on_event=notes.append),
        "datasets": lambda: attnlm.list_datasets(data_dir, on_event=notes.append),
        "recipes": attnlm.list_recipes,
        "heads": attnlm.list_heads,
    }
    kinds = (KINDS if json else KINDS[:2]) if kind is None else (kind,)
    listed = {name: list_functions[name]() for name in kinds}
    if json:
        console.print_json({name: [*map(asdict, entries)] for name, entries in listed.items()})
        return
    for name, entries in listed.items():
        if entries:
            if name == "datasets" and listed.get("runs"):
                console.print_result("")
            _print_entries(name, entries)
        else:
            thing, parent = ("run", checkpoint_dir) if name == "runs" else ("data set", data_dir)
            console.say(f"there is no {thing} in {parent} yet; {how_to_make(thing, Path(parent))}")
    for note in notes:
        console.say(str(note))


def _run_row(run: attnlm.RunEntry) -> dict[str, str]:
    steps = run.step if run.kind == "run" else run.steps
    left = f"/{run.steps:,}" if run.step is not None and run.steps not in (None, run.step) else ""
    marks = _LEAKS * bool(run.leaks) + _PART * bool(run.evaluated_part)
    return {
        "run": _name(run),
        "model": run.model or (run.kind if run.kind != "run" else ""),
        "data": run.dataset or "",
        "steps": _number(steps, ",") + left,
        "loss": marks + _number(run.val_loss, ".4f"),
        "bits/byte": _number(run.bits_per_byte, ".3f"),
        **_size_and_age(run),
        "parent": f"from {run.imported_from}" if run.imported_from else run.parent or "",
    }


def _dataset_row(dataset: attnlm.DatasetEntry) -> dict[str, str]:
    return {
        "data set": _name(dataset),
        "source": dataset.source or "",
        "tokenizer": dataset.tokenizer or "",
        "ids": _number(dataset.vocab_size, ","),
        "train": quantity(dataset.train_tokens) if dataset.train_tokens else "",
        "validate": quantity(dataset.val_tokens) if dataset.val_tokens else "",
        "split": dataset.split or ("file" if dataset.val_tokens else ""),
        **_size_and_age(dataset),
    }


def _recipe_row(recipe: attnlm.RecipeEntry) -> dict[str, str]:
    seconds = dict.fromkeys(duration(bound, 2) for bound in recipe.seconds_range or ())
    return {
        "recipe": recipe.name,
        "loss": _number(recipe.val_loss, ".3f"),
        "time": " to ".join(seconds),
        "purpose": recipe.purpose,
    }


def _head_row(head: attnlm.HeadEntry) -> dict[str, str]:
    return {"head": head.name, "idea": head.idea, "source": head.source}


def _name(entry: attnlm.RunEntry | attnlm.DatasetEntry) -> str:
    mark = "*" if entry.is_latest else ""
    return f"{entry.name}{mark}" + (f" → {entry.link}" if entry.link is not None else "")


def _number(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)


def _size_and_age(entry: attnlm.RunEntry | attnlm.DatasetEntry) -> dict[str, str]:
    return {
        "size": quantity(entry.bytes, "B") if entry.bytes else "",
        "age": f"{duration(max(0.0, time.time() - entry.modified), 2)} ago"
        if entry.modified
        else "",
    }


_LEAKS, _PART = "!", "~"
_ROWS: dict[str, Callable[[Any], dict[str, str]]] = {
    "runs": _run_row,
    "datasets": _dataset_row,
    "recipes": _recipe_row,
    "heads": _head_row,
}
_TEXTS = (
    "run", "model", "data", "parent", "data set", "source", "tokenizer", "split",
    "recipe", "purpose", "head", "idea",
)  # fmt: skip


def _print_entries(kind: str, entries: Sequence[Any]) -> None:
    """Print a table of runs, data sets, recipes or heads, then notes about the entries."""
    rows = [_ROWS[kind](entry) for entry in entries]
    console.print_table([*rows[0]], [[*row.values()] for row in rows], _TEXTS)
    if kind == "recipes":
        console.say(
            "losses are medians on Tiny Shakespeare and times are for two cores of a server CPU, "
            "if measured; R1 to R5 are the reference systems of docs/train.md"
        )
        console.say_next("attnlm train --recipe NAME")
        return
    if kind == "heads":
        console.say_next("attnlm check HEAD", entries[0].command)
        return
    if any(entry.is_latest for entry in entries):
        console.say(f"* used by commands when no {next(iter(rows[0]))} is named")
    for entry in entries:
        if entry.problem is not None:
            console.say(f"  {entry.name}: {entry.problem}", "unreadable", "bold yellow")
    if kind == "runs":
        if any(entry.evaluated_part for entry in entries):
            console.say(
                f"{_PART} measured on a part of the validation split; attnlm eval measures all of "
                "it, up to its first 4,194,304 tokens"
            )
        if any(entry.leaks for entry in entries):
            console.say(f"{_LEAKS} {NOT_COMPARABLE}")
        for entry in entries:
            if entry.is_training:
                console.say(f"{entry.name} is being trained now")


# --- check and doctor -----------------------------------------------------------------------------

_LABEL = 14  # characters of a finding's name


@with_options(
    "part",
    "set",
    settings={name: record for name, record in RECORD_OF.items() if record is Architecture},
    common=(
        "model", "embed_dim", "block_size", "heads", "positions", "set", "part", "json", "code",
    ),
    vocab_size=option(65, "size of the vocabulary"),
)  # fmt: skip
def check(
    code: str = argument(REQUIRED, "FILE.py:NAME", "a class or function of your own"),
    *,
    json: bool,
    **settings: Any,
) -> None:
    """Check code of your own: does it fit, is it causal, what does it cost?

    A part maps (B, T, C) to (B, T, C), or queries and keys to scores. A model maps ids (B, T) to
    logits. The code is run, on random ids and on the CPU.
    """
    _report(attnlm.check(code, **options.given(settings)), json, "all of it holds")


@with_options()
def doctor(json: bool) -> None:
    """Check this machine: versions, folders, devices, memory, kernels."""
    _report(attnlm.doctor(), json, "no problems found")


def _report(checks: Iterable[Finding], json: bool, none: str) -> None:
    """Print each finding when it comes, then their number. Exit with 1 if one is fatal."""
    findings = []
    for finding in checks:
        findings.append(finding)
        lines = [f"{finding.name:<{_LABEL}}{finding.text}"]
        if finding.remedy:
            lines.append(f"{'':<{_LABEL}}→ {finding.remedy}")
        for line in [] if json else lines:
            console.print_result(console.escape_unprintable(console.with_flags(line)))
    is_fatal = any(finding.is_fatal for finding in findings)
    if json:
        console.print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        remedies = sum(bool(finding.remedy) for finding in findings)
        console.say(f"{remedies} to look at: see the → lines" if remedies else none)
    if is_fatal:
        raise typer.Exit(1)
