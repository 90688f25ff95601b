"""List the runs and ladders in a folder, without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.base.folders import folder_size, link_target, modified, newest_first, problem_of
from attnlm.base.workspaces import is_locked
from attnlm.runs.ladder_plan import RECORD, read_plan
from attnlm.runs.open_run import open_run

# A folder with any of these files counts as a run, even if other files are missing.
_OF_A_RUN = ("config.json", "metrics.jsonl", "last.safetensors", "best.safetensors", "last", "best")


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run or a ladder in a list, possibly damaged, with None for unknown values."""

    name: str
    path: Path
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
    """the lowest validation loss, in nats per token; on the whole split if measured"""
    evaluated_part: str | None = None
    """the part of the split that the loss is measured on; None for the whole split"""
    bits_per_byte: float | None = None
    """from the same evaluation"""
    seconds: float | None = None
    """duration of training"""
    bytes: int = 0
    """total size of the files in its folder; 0 for a link"""
    modified: float = 0.0
    """when it was last trained, in seconds since 1970"""
    parent: str | None = None
    """the name of the run whose weights it started from"""
    imported_from: str | None = None
    rungs: tuple[str, ...] = ()
    """the names of a ladder's runs"""
    link: str | None = None
    """the target, if `path` is a link"""
    is_latest: bool = False
    """whether commands use it by default"""
    is_training: bool = False
    """whether a process is training it"""
    problem: str | None = None
    """why it can't be read"""


def list_runs(
    checkpoint_dir: str | Path = "checkpoints", *, on_event: OnEvent | None = None
) -> list[RunEntry]:
    """Return the runs and ladders in a folder, newest first; damaged ones have a `problem`.

        best = min(attnlm.list_runs(), key=lambda entry: entry.val_loss or 99.0)

    A Note lists folders that are neither. Raises AttnlmError if `checkpoint_dir` can't be read.
    """
    entries, others = newest_first(Path(checkpoint_dir), run_entry)
    if others and on_event is not None:
        on_event(Note(f"skipped (not a run): {', '.join(others)}"))
    return entries


def run_entry(path: Path) -> RunEntry | None:
    """Return the run or ladder in `path`, possibly damaged, or None for another folder."""
    link = link_target(path)
    if problem := problem_of(path):
        return RunEntry(name=path.name, path=path, link=link, problem=problem)
    is_ladder = _has(path, RECORD)
    if not is_ladder and not any(_has(path, name) for name in _OF_A_RUN):
        return None
    found = RunEntry(
        name=path.name,
        path=path,
        kind="ladder" if is_ladder else "run",
        bytes=0 if link is not None else folder_size(path),
        modified=modified(*(path / name for name in (RECORD, *_OF_A_RUN[:2]))),
        link=link,
        is_training=is_locked(Path(os.path.realpath(path))),
    )
    try:
        return _ladder(found) if is_ladder else _run(found)
    except AttnlmError as error:
        return replace(found, problem=error.message)
    except OSError as error:
        return replace(found, problem=f"it cannot be read: {error.strerror}")


def _has(folder: Path, name: str) -> bool:
    return os.path.lexists(folder / name)


def _ladder(found: RunEntry) -> RunEntry:
    made = read_plan(found.path)
    names = tuple(path.name for path in made.runs(found.path).values())
    return replace(found, dataset=made.dataset, steps=made.steps, rungs=names)


def _run(found: RunEntry) -> RunEntry:
    # Open the absolute path, since a bare name could be found in another folder.
    run = open_run(found.path.absolute())
    result = run.result()
    return replace(
        found,
        model=run.config.model.model,
        dataset=None if run.imported_from else run.dataset["name"],
        parameters=run.parameters,
        steps=None if run.imported_from else run.config.training.steps,
        parent=None if run.parent is None else run.parent["name"],
        imported_from=run.imported_from or None,
        evaluated_part=None if result is None else result.part or None,
        **({} if result is None else result.facts()),
    )
