"""List and compare runs, without torch."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base.events import OnEvent
from attnlm.base.folders import CHECKPOINT_DIR, FolderEntry, is_locked, newest_first, read_entry
from attnlm.runs.exam_plan import ExamPlan
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.run import open_run

# A folder with such a file counts as a run, even if other files are missing.
_FILES = ("config.json", "metrics.jsonl", "last.safetensors", "best.safetensors")


@dataclass(frozen=True, kw_only=True)
class RunEntry(FolderEntry):
    """An entry of `list_runs`: a run, a ladder or an exam, which may be damaged. Values that are
    unknown or absent are None."""

    kind: str = "run"
    """run, ladder or exam"""
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
    checkpoint_dir: str | Path = CHECKPOINT_DIR, *, on_event: OnEvent | None = None
) -> list[RunEntry]:
    """Return the runs and ladders in a folder, newest first; damaged ones have a `problem`.

        best = min(attnlm.list_runs(), key=lambda entry: entry.val_loss or 99.0)

    `on_event` gets a Note that lists folders that are neither runs nor ladders. Raises AttnlmError
    if `checkpoint_dir` can't be read.
    """
    return newest_first(Path(checkpoint_dir), run_entry, "run", on_event)


def run_entry(path: Path) -> RunEntry | None:
    """Return the entry of the run or ladder in `path`, or None for any other folder."""
    kind, read_values = "run", _run_values
    for plan, values in ((ExamPlan, _exam_values), (LadderPlan, _ladder_values)):
        if os.path.lexists(path / plan.FILE):
            kind, read_values = plan.KIND, values
    if kind == "run" and not any(os.path.lexists(path / name) for name in _FILES):
        return None
    entry = RunEntry(name=path.name, path=path, kind=kind, is_training=is_locked(path))
    dated_by = (ExamPlan.FILE, LadderPlan.FILE, *_FILES[:2])
    return read_entry(entry, dated_by, functools.partial(read_values, path))


def _ladder_values(path: Path) -> dict[str, Any]:
    plan = LadderPlan.read(path)
    names = tuple(run.name for paths in plan.runs(path).values() for run in paths)
    return {"dataset": plan.dataset.name, "steps": plan.steps, "rungs": names}


def _exam_values(path: Path) -> dict[str, Any]:
    plan = ExamPlan.read(path)
    return {"model": plan.candidate, "dataset": f"{len(plan.tasks)} tasks"}


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
