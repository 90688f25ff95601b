"""Open runs and their data sets without loading torch, which takes a second."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.folders import find_folder, how_to_make, is_folder, problem_of
from attnlm.base.records import read_record
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.runs.run import COPY_THE_RUN, FORMAT, Run, StoredRun, damaged


def open_run(
    name: str | Path | Run | None = None, *, checkpoint_dir: str | Path = "checkpoints"
) -> Run:
    """Return the run called `name` in `checkpoint_dir`, or at the path `name`; default: the newest.

        run = attnlm.open_run("multi-head-001")
        run.config.training.steps, run.metrics()[-1]["val_loss"]

    A Run is returned unchanged. Raises AttnlmError if the run does not exist or its configuration
    is damaged.
    """
    if isinstance(name, Run):
        return name
    path = find_folder(name, Path(checkpoint_dir), kind="run")
    if problem := problem_of(path):
        raise AttnlmError(f"cannot open {path}: {problem}", "check its permissions")
    if (path / "ladder.json").exists():
        raise AttnlmError(
            f"{path.name} is a ladder, not a run",
            f"use the name of a rung, as in {path.name}-bigram",
        )
    if (path / "generation_config.json").exists() and not (path / "metrics.jsonl").exists():
        raise AttnlmError(
            f"{path} is a folder in Hugging Face's format, not a run",
            f"make a run of it: attnlm import {path}",
        )
    if not (path / "config.json").exists():
        raise AttnlmError(
            f"{path} is not a run: it has no config.json", how_to_make("run", Path(checkpoint_dir))
        )
    stored = read_record(StoredRun, path / "config.json", format=FORMAT, hint=COPY_THE_RUN)
    try:
        config = resolve({}, stored.config)
    except AttnlmError as error:
        raise AttnlmError(f"{path / 'config.json'} is damaged: {error}", error.hint) from None
    about = stored.dataset
    is_trained = about.train_tokens and about.val_tokens and about.val_bytes
    if config.training.length == "?" or not (is_trained or stored.imported_from):
        raise damaged(path / "config.json")
    return Run(path, **{**asdict(stored), "config": config})


def open_dataset_of(run: Run, data_dir: Path, *, verify: bool = False) -> Dataset:
    """Return the data set of a run.

    The data set is opened at the path that the run recorded or, if no folder is there, by name in
    `data_dir`. Raises AttnlmError if it is missing or has changed, or if the run was imported.
    """
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported and has no data set",
            f"prepare one with `tokenizer` {run.path}, then name it as `data`",
        )
    recorded = Path(run.dataset["path"])
    dataset = open_dataset(
        recorded if is_folder(recorded) else run.dataset["name"],
        data_dir=data_dir,
        verify=verify,
    )
    recorded_facts = {**run.dataset, "vocab_size": run.vocab_size}
    for key in ("train_sha256", "val_sha256", "vocab_size"):
        if getattr(dataset, key) != recorded_facts[key]:
            raise AttnlmError(
                f"{dataset.path} is not the data set that {run.name} was trained on",
                f"prepare the original data set again, or move it to {recorded}",
            )
    return dataset
