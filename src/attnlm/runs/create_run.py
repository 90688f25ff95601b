"""Make the folders of new runs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import check_name, folder_names, resume_command, write_latest
from attnlm.base.settings import fields_of
from attnlm.base.workspaces import workspace
from attnlm.config.settings import Config
from attnlm.data.dataset import Dataset
from attnlm.runs.load_model import keep_base
from attnlm.runs.run import DatasetFacts, Run
from attnlm.tokens.tokenizer import Tokenizer


def create_run(
    config: Config,
    dataset: Dataset,
    parameters: int,
    *,
    name: str | None,
    checkpoint_dir: Path,
    parent: Mapping[str, Any] | None = None,
) -> Run:
    """Create the folder of a new run atomically; default names are `<model>-001` and so on.

    `parent` describes the run whose weights the new run starts from (see `Parent`). If the new run
    trains adapters, its folder also gets these weights. Raises AttnlmError if the name exists,
    UsageError if it can't be a folder's name.
    """
    about = {name: getattr(dataset, name) for name in fields_of(DatasetFacts)}
    about["path"] = str(dataset.path)
    run = Run(checkpoint_dir, config, dataset.vocab_size, parameters, about, parent=parent)
    fill = None if config.training.adapters is None else keep_base
    return put_new(run, dataset.tokenizer, name, checkpoint_dir, fill)


def check_free(name: str, checkpoint_dir: Path, *, is_trained: bool = True) -> None:
    """Check a name before slow work begins: raise the error that `create_run` would raise later."""
    check_name(name)
    path = checkpoint_dir / name
    if os.path.lexists(path):
        resume = f", or resume it: {resume_command(path)}; `exist_ok` accepts it if it is finished"
        raise AttnlmError(
            f"a run called {name} exists, and runs are never overwritten",
            f"choose another `name`{resume if is_trained else ''}",
        )


def put_new(
    run: Run,
    tokenizer: Tokenizer,
    name: str | None,
    checkpoint_dir: Path,
    fill: Callable[[Run], Run] | None = None,
) -> Run:
    """Create the folder of `run` in a temporary place, then move it into `checkpoint_dir`.

    `fill(run)` writes more files to the temporary folder `run.path`, and returns the run to save in
    config.json. If `name` is None, the run gets the first free name of `<model>-001`,
    `<model>-002`, … The name of a removed run stays reserved while other runs record that run as
    their parent. Raises as `create_run` does.
    """
    if name is not None:
        check_free(name, checkpoint_dir, is_trained=not run.imported_from)
    with workspace(checkpoint_dir) as work:
        new = work / "new"
        new.mkdir()
        run = replace(run, path=new)
        files.write_json(new / "tokenizer.json", tokenizer.to_json())
        run = run if fill is None else fill(run)
        run.save_config()
        parents = set()
        for other in [] if name else folder_names(checkpoint_dir, "run"):
            with contextlib.suppress(AttnlmError, KeyError, TypeError):  # damaged, or no parent
                about = files.read_json(checkpoint_dir / other / "config.json")
                parents.add(about["parent"]["name"])
        for number in itertools.count(1):
            if name is not None:
                check_free(name, checkpoint_dir, is_trained=not run.imported_from)
            path = checkpoint_dir / (name or f"{run.config.spec.name}-{number:03}")
            # A rename would replace an empty folder, which may belong to somebody.
            if path.name in parents or os.path.lexists(path):
                continue
            try:
                new.rename(path)
                break
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
    write_latest(checkpoint_dir, path.name)
    return replace(run, path=path)
