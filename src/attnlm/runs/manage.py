"""List and compare runs, without torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import is_locked
from attnlm.base.events import OnEvent
from attnlm.base.folders import FolderEntry, newest_first, read_entry
from attnlm.runs.ladder_plan import RECORD, read_plan
from attnlm.runs.records import NOT_COMPARABLE
from attnlm.runs.run import Run, open_run

# A folder with such a file counts as a run, even if other files are missing.
_FILES = ("config.json", "metrics.jsonl", "last.safetensors", "best.safetensors")


@dataclass(frozen=True, kw_only=True)
class RunEntry(FolderEntry):
    """An entry of `list_runs`: a run or a ladder, which may be damaged. Values that are unknown or
    absent are None."""

    kind: str = "run"
    """run or ladder"""
    model: str | None = None
    dataset: str | None = None
    parameters: int | None = None
    step: int | None = None
    """the last evaluated step"""
    steps: int | None = None
    """the number of steps of the whole training run"""
    val_loss: float | None = None
    """the best checkpoint's validation loss in nats per token; that on the whole split if known"""
    leaks: str | None = None
    """how its logits depend on later tokens, so that its losses mean nothing"""
    evaluated_part: str | None = None
    """what `val_loss` is measured on: `65,536 of 1,115,394 tokens`; None for the whole split"""
    bits_per_byte: float | None = None
    """bits per byte in the same evaluation as `val_loss`"""
    seconds: float | None = None
    """duration of training"""
    parent: str | None = None
    """the name of the run whose weights it started from"""
    imported_from: str | None = None
    rungs: tuple[str, ...] = ()
    """the names of a ladder's runs"""
    is_training: bool = False
    """whether a process is training it"""


def list_runs(
    checkpoint_dir: str | Path = "checkpoints", *, on_event: OnEvent | None = None
) -> list[RunEntry]:
    """Return the runs and ladders in a folder, newest first; damaged ones have a `problem`.

        best = min(attnlm.list_runs(), key=lambda entry: entry.val_loss or 99.0)

    `on_event` gets a Note that lists folders that are neither runs nor ladders. Raises AttnlmError
    if `checkpoint_dir` can't be read.
    """
    return newest_first(Path(checkpoint_dir), run_entry, "run", on_event)


def run_entry(path: Path) -> RunEntry | None:
    """Return the entry of the run or ladder in `path`, or None for any other folder."""
    is_ladder = os.path.lexists(path / RECORD)
    if not is_ladder and not any(os.path.lexists(path / name) for name in _FILES):
        return None
    entry = RunEntry(
        name=path.name,
        path=path,
        kind="ladder" if is_ladder else "run",
        is_training=is_locked(path),
    )
    read_values = functools.partial(_ladder_values if is_ladder else _run_values, path)
    return read_entry(entry, (RECORD, *_FILES[:2]), read_values)


def _ladder_values(path: Path) -> dict[str, Any]:
    plan = read_plan(path)
    names = tuple(run.name for run in plan.runs(path).values())
    return {"dataset": plan.dataset, "steps": plan.steps, "rungs": names}


def _run_values(path: Path) -> dict[str, Any]:
    # Open the absolute path, since a bare name could be found in another folder.
    run = open_run(path.absolute())
    result = run.result()
    return {
        "model": run.config.spec.name,
        "dataset": None if run.imported_from else run.dataset.name,
        "parameters": run.parameters,
        "steps": None if run.imported_from else run.config.training.steps,
        "parent": None if run.parent is None else run.parent.name,
        "imported_from": run.imported_from or None,
        "leaks": run.leaks or None,
        "evaluated_part": None if result is None else result.part or None,
        **({} if result is None else result.facts()),
    }


# --- Comparing ------------------------------------------------------------------------------------

Pairs = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class RunDiff:
    """Two runs, and the values in which they differ. The name of a value maps to the pair of both
    runs' values, with None for a missing value."""

    a: Run
    b: Run
    settings: Pairs
    data: Pairs
    result: Pairs
    """all results, including equal ones"""
    warnings: tuple[str, ...]
    """reasons why the results are not directly comparable"""


def diff_runs(
    a: str | Path | Run, b: str | Path | Run, *, checkpoint_dir: str | Path = "checkpoints"
) -> RunDiff:
    """Return how two runs differ in settings and data, and the results of both.

        attnlm.diff_runs("multi-head-001", "transformer-001").settings

    Raises AttnlmError as `open_run` does, and if metrics are damaged.
    """
    first, second = (open_run(run, checkpoint_dir=checkpoint_dir) for run in (a, b))
    results = first.result(), second.result()
    values = [{} if result is None else result.facts() for result in results]
    warnings = []
    if None not in results:
        if first.tokenizer.to_json() != second.tokenizer.to_json():
            warnings.append(
                "the tokenizers differ, so losses per token cannot be compared: compare bits per "
                "byte"
            )
        if first.dataset.val_sha256 != second.dataset.val_sha256:
            warnings.append("the losses were measured on different validation splits")
        for run, result in zip((first, second), results, strict=True):
            if result is not None and result.part:
                warnings.append(f"the loss of {run.name} was measured on {result.part}")
            if run.leaks:
                warnings.append(f"the loss of {run.name} is {NOT_COMPARABLE}")
    return RunDiff(
        first,
        second,
        settings=_differing_pairs(first.config.settings(), second.config.settings()),
        data=_differing_pairs(_data_values(first), _data_values(second)),
        result={"parameters": (first.parameters, second.parameters), **_value_pairs(*values)},
        warnings=tuple(warnings),
    )


def _data_values(run: Run) -> dict[str, Any]:
    dataset = run.dataset
    return {
        "dataset": None if run.imported_from else dataset.name,
        "train_sha256": dataset.train_sha256 or None,
        "val_sha256": dataset.val_sha256 or None,
        "train_tokens": dataset.train_tokens or None,
        "val_tokens": dataset.val_tokens or None,
        "tokenizer": run.tokenizer.name,
        "vocab_size": run.vocab_size,
        "bigram_loss": dataset.bigram_loss,
        "parent": run.started_from or None,
        "imported_from": run.imported_from or None,
    }


def _value_pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b}}


def _differing_pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in _value_pairs(a, b).items() if pair[0] != pair[1]}
