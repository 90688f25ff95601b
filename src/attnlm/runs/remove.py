"""Remove runs atomically; files outside of their folders stay."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import explaining
from attnlm.base.folders import (
    LATEST,
    find_folder,
    folder_names,
    is_folder,
    is_safe_name,
    latest_name,
    link_target,
    write_latest,
)
from attnlm.base.workspaces import trained_alone, workspace
from attnlm.runs.list_runs import RunEntry, run_entry
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run

_WAIT = "wait until that process ends, or stop it"


def removable(run: str | Path | Run, checkpoint_dir: str | Path = "checkpoints") -> RunEntry:
    """Return the run or ladder that `remove_run` would remove.

    Raises AttnlmError if it does not exist, is in another folder, or is being trained.
    """
    parent = Path(checkpoint_dir)
    named = run.path if isinstance(run, Run) else run
    path = _directly_in(parent, named)
    entry = run_entry(path)
    if entry is None:
        raise _no_run(path)
    if entry.is_training:
        raise AttnlmError(f"{entry.name} is being trained by another process", _WAIT)
    return entry


def _directly_in(parent: Path, named: str | Path) -> Path:
    """Return the path of a folder or link in `parent`. Links are not followed."""
    if is_safe_name(str(named)) and _is_entry(parent / named):
        return parent / named
    path = Path(named)
    if not _is_entry(path):
        find_folder(named, parent, kind="run")  # its error names the runs that exist
        raise UsageError(f"{str(named)!r} is not a run", "use a name or a path")
    is_there = is_folder(parent) and path.absolute().parent.samefile(parent)
    if path.name in ("", "..") or not is_there:
        if run_entry(path) is None:
            raise _no_run(path)
        raise AttnlmError(
            f"{path} is not in {parent}; only runs in this folder are removed",
            f"name the folder of the run: `checkpoint_dir` {path.absolute().parent}",
        )
    return parent / path.name


def _no_run(path: Path) -> AttnlmError:
    return AttnlmError(f"{path} is not a run", "only runs and ladders are removed")


def _is_entry(path: Path) -> bool:
    return is_folder(path) or path.is_symlink()


def remove_run(run: str | Path | Run, *, checkpoint_dir: str | Path = "checkpoints") -> None:
    """Remove a run in `checkpoint_dir`, or a ladder's own folder, in one step.

        attnlm.remove_run("transformer-001")

    If a link stands for the folder, the link is removed and its target stays. `latest` then names
    the newest run that is left. Raises AttnlmError as `removable` does.
    """
    entry = removable(run, checkpoint_dir)
    parent = entry.path.parent
    with explaining(entry.path):
        if entry.link is not None:
            entry.path.unlink()
            _rename_latest(parent, entry.name)
            return
        # One rename removes it. If killed here, the next command deletes the leftovers.
        with trained_alone(entry.path, _WAIT), workspace(parent) as work:
            entry.path.rename(work / "removed")
            _rename_latest(parent, entry.name)
    if os.path.lexists(work):
        raise AttnlmError(
            f"{entry.name} was removed, but some files cannot be deleted: they are in {work}",
            "check the permissions there, then delete that folder",
        )


def _rename_latest(parent: Path, removed: str) -> None:
    """Point `latest` to the newest run that can be opened; delete it if no run can."""
    with contextlib.suppress(AttnlmError):
        if latest_name(parent) != removed:
            return
        for name in folder_names(parent, "run"):
            with contextlib.suppress(AttnlmError):
                open_run(name, checkpoint_dir=parent)
                write_latest(parent, name)
                return
        (parent / LATEST).unlink(missing_ok=True)


def removal_warnings(entry: RunEntry, others: list[RunEntry]) -> list[str]:
    """Return warnings to show before a run is removed; `others` are all runs next to it."""
    name, warnings = entry.name, []
    if entry.link is not None:
        warnings.append(f"{name} is a link: {link_target(entry.path)} stays")
    children = [other.name for other in others if other.parent == name]
    if children:
        warnings.append(f"started from {name}: {', '.join(children)}")
    ladders = [other.name for other in others if name in other.rungs]
    if ladders:
        warnings.append(
            f"{name} belongs to {', '.join(ladders)}, which would train it again if resumed"
        )
    if entry.rungs:
        left = [other.name for other in others if other.name in entry.rungs]
        warnings += [f"its runs stay: {', '.join(left)}"] if left else []
    return warnings
