"""Build the commands that reproduce a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from attnlm.base.folders import command_for, flag, folder_flag
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import fields_of
from attnlm.data.dataset import Dataset
from attnlm.model.own_specs import CODE, PREFIX
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.run import Run


def prepare_command(dataset: Dataset) -> str:
    """Return the command that prepares the same data set again from unchanged sources.

    In the command, TEXT stands for a text that came from stdin.
    """
    words = ["attnlm", "prepare", *dataset.sources]
    words += ["--tokenizer", dataset.tokenizer_from or dataset.tokenizer.name]
    if dataset.val_source is not None:
        words += ["--val-file", dataset.val_source]
    for name in ("val_fraction", "split"):
        if dataset.val_source is None and getattr(dataset, name) is not None:
            words += [flag(name), str(getattr(dataset, name))]
    column = None if dataset.records_on_stdin else "text"  # if given, stdin has records
    for name, default in (("encoding", "utf-8"), ("column", column)):
        if getattr(dataset, name) != default:
            words += [flag(name), getattr(dataset, name)]
    words += ["--name", dataset.name, *folder_flag(dataset.path.parent, "data set")]
    return shlex.join(words) + (" < TEXT" if "-" in (*dataset.sources, dataset.val_source) else "")


def train_command(run: Run) -> str:
    """Return the command that trains the run again, with all settings, even those at the default.

    For a run with a budget, the command gives the steps that the run made. The learning rate then
    follows the steps, not the clock, so the checkpoint is not the same byte for byte.
    """
    words = ["attnlm", "train", run.dataset.name]
    if run.parent is not None:
        path = Path(run.parent.path)
        is_usual = path.parent == Path("checkpoints").absolute()
        words += ["--from", path.name if is_usual else str(path)]
        words += ["--checkpoint", run.parent.checkpoint]
    settings = run.config.settings()
    if "steps" in settings:
        settings.pop("budget", None)
    settings.pop(CODE, None)
    for name, value in settings.items():
        if isinstance(value, OwnCode):
            words += [flag(name), f"{value.path}:{value.name}"]
        elif name.startswith(PREFIX):
            words += ["--set", f"{name.removeprefix(PREFIX)}={value}"]
        elif isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [flag(name), str(value)]
    return shlex.join([*words, *folder_flag(Path(run.dataset.path).parent, "data set")])


def import_command(run: Run) -> str:
    """Return the command that imports a run again."""
    words = ["attnlm", "import", run.imported_from, "--name", run.name]
    return shlex.join([*words, *folder_flag(run.path.parent)])


def sample_command(run: Run, checkpoint: str, tokens: int, seed: int) -> str:
    """Return the command that samples a text of `tokens` tokens from the run with `seed`."""
    flags = [] if checkpoint == run.checkpoint("auto").which else ["--checkpoint", checkpoint]
    flags += ["--tokens", str(tokens), "--seed", str(seed)]
    return command_for("attnlm sample", run.path, *flags, named=True)


def ladder_command(plan: LadderPlan) -> str:
    """Return the command that trains a ladder again, by steps unless its rungs have equal time."""
    usual = Path(plan.dataset_path) == Path("data") / plan.dataset
    dataset = plan.dataset if usual else plan.dataset_path
    words = ["attnlm", "ladder", dataset, "--rungs", ",".join(plan.rungs)]
    names = ("steps", "eval_every", "seed", "seeds", "tune", "equal", "tokens", "eval_tokens")
    for name in (*names, "threads", *(["budget"] if plan.steps is None else [])):
        if getattr(plan, name) != fields_of(LadderPlan)[name].default:
            words += [flag(name), str(getattr(plan, name))]
    return shlex.join([*words, *(["--prompt", plan.prompt] if plan.prompt else [])])


def report_command(run: Run) -> str:
    """Return the command that reports on the run with another text."""
    return command_for("attnlm report", run.path, "--text", "TEXT", named=True)
