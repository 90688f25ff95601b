"""Build the commands that reproduce a run or a ladder."""

from __future__ import annotations

import shlex
from pathlib import Path

from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR, flag, folder_flag
from attnlm.data.dataset import Dataset
from attnlm.runs.ladder_plan import SETTINGS, LadderPlan
from attnlm.runs.run import Run


def prepare_command(dataset: Dataset) -> str:
    """Return the command that prepares the same data set again from unchanged sources.

    In the command, TEXT stands for a text that came from stdin.
    """
    words = ["attnlm", "prepare", *dataset.sources]
    if dataset.tokenizer.name != "ids":
        words += ["--tokenizer", dataset.tokenizer_from or dataset.tokenizer.name]
    for name, value in dataset.options.items():
        words += [flag(name), str(value)]
    words += ["--name", dataset.name, *folder_flag(dataset.path.parent, "data set")]
    return shlex.join(words) + (" < TEXT" if "-" in (*dataset.sources, dataset.val_source) else "")


def train_command(run: Run) -> str:
    """Return the command that trains the run again, with the settings in its folder.

    For a run with a budget, these are the steps that the run made. The learning rate then follows
    the steps, not the clock, so the checkpoint is not the same byte for byte.
    """
    words = ["attnlm", "train", run.dataset.name, "--recipe", str(run.path / "config.json")]
    if run.parent is not None:
        path = Path(run.parent.path)
        is_usual = path.parent == Path(CHECKPOINT_DIR).absolute()
        words += ["--from", path.name if is_usual else str(path)]
        words += ["--checkpoint", run.parent.checkpoint]
    return shlex.join([*words, *folder_flag(Path(run.dataset.path).parent, "data set")])


def import_command(run: Run) -> str:
    """Return the command that imports a run again."""
    words = ["attnlm", "import", run.imported_from, "--name", run.name]
    return shlex.join([*words, *folder_flag(run.path.parent)])


def ladder_command(plan: LadderPlan, baseline: str | None = None) -> str:
    """Return the command that trains a ladder again, by steps."""
    dataset = plan.dataset
    usual = Path(dataset.path).absolute() == Path(DATA_DIR).absolute() / dataset.name
    words = ["attnlm", "ladder", dataset.name if usual else dataset.path]
    words += ["--rungs", ",".join(plan.rungs), "--steps", str(plan.steps)]
    given = {name: getattr(plan, name) for name in SETTINGS if name not in ("budget", "steps")}
    for name, value in {**given, "baseline": baseline}.items():
        if value != getattr(LadderPlan, name, None):
            words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)
