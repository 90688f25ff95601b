"""Make the folders of new runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.atomic_folders import move_to_free, numbered_paths, workspace
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import check_name, resume_command, write_latest
from attnlm.base.setting_fields import fields_of
from attnlm.config.settings import Config
from attnlm.data.dataset import Dataset
from attnlm.model.own_arguments import CODE
from attnlm.runs.records import DatasetFacts, ParentRecord
from attnlm.runs.run import Run
from attnlm.tokens.tokenizer import Tokenizer


def create_run(
    config: Config,
    dataset: Dataset,
    parameters: int,
    *,
    name: str | None,
    checkpoint_dir: Path,
    parent: ParentRecord | None = None,
    leaks: str = "",
) -> Run:
    """Create the folder of a new run atomically; default names are `<model>-001` and so on.

    `leaks` is as in Run. `parent` describes the run whose weights the new run starts from. Raises
    AttnlmError if the name exists, UsageError if it can't be a folder's name.
    """
    names = fields_of(DatasetFacts)
    copied: dict[str, Any] = {name: getattr(dataset, name, None) for name in names}
    if dataset.examples is not None:
        copied |= vars(dataset.examples)
        if config.training.loss_on != "answers":  # reference losses count the answers only
            copied |= {"bigram_loss": None, "floor": None}
    facts = {name: copied[name] for name in names}
    run = Run(
        checkpoint_dir,
        config,
        vocab_size=dataset.vocab_size,
        parameters=parameters,
        dataset=DatasetFacts(**{**facts, "path": str(dataset.path)}),
        parent=parent,
        leaks=leaks,
    )
    return create_run_folder(run, dataset.tokenizer, name, checkpoint_dir)


def check_name_is_free(name: str, checkpoint_dir: Path, *, is_trained: bool = True) -> None:
    """Check a name before slow work begins: raise the error that `create_run` would raise later."""
    check_name(name)
    path = checkpoint_dir / name
    if os.path.lexists(path):
        resume = f", or resume it: {resume_command(path)}; `exist_ok` accepts it if it is finished"
        raise AttnlmError(
            f"a run called {name} exists, and runs are never overwritten",
            f"choose another `name`{resume if is_trained else ''}",
        )


def create_run_folder(
    run: Run,
    tokenizer: Tokenizer,
    name: str | None,
    checkpoint_dir: Path,
    fill: Callable[[Run], object] = lambda run: None,
) -> Run:
    """Create the folder of `run` in a temporary place, then move it into `checkpoint_dir`.

    `fill(run)` writes more files to the temporary folder `run.path`. If `name` is None, the run
    gets the first free name of `<model>-001`, `<model>-002`, … Raises as `create_run` does.
    """
    if name is not None:
        check_name_is_free(name, checkpoint_dir, is_trained=not run.imported_from)
    with workspace(checkpoint_dir) as work:
        folder = work / "new"
        folder.mkdir()
        run = replace(run, path=folder)
        files.write_json(folder / "tokenizer.json", tokenizer.to_json())
        for code in run.config.codes:
            (folder / CODE).mkdir(exist_ok=True)
            files.write_bytes(folder / CODE / code.file, code.content())
            code.remember(run.config.arguments_of(code))
        fill(run)
        run.save_config()
        places = numbered_paths(checkpoint_dir, run.config.spec.name)
        if name is not None:
            check_name_is_free(name, checkpoint_dir, is_trained=not run.imported_from)
            places = iter([checkpoint_dir / name])
        path = move_to_free(folder, places)
    write_latest(checkpoint_dir, path.name)
    return replace(run, path=path)
