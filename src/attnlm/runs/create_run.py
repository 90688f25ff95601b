"""Make the folders of new runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.files import move_to_free, numbered_paths, workspace
from attnlm.base.folders import DATA_DIR, check_name, resume_command, write_latest
from attnlm.config.settings import Config
from attnlm.data.dataset import Dataset
from attnlm.model.own_arguments import CODE
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.records import CheckpointFacts, DatasetFacts, ParentRecord, dataset_facts
from attnlm.runs.run import Run
from attnlm.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


def create_run(
    config: Config,
    dataset: Dataset,
    parameters: int,
    *,
    name: str | None,
    checkpoint_dir: Path,
    data_dir: Path = Path(DATA_DIR),
    parent: ParentRecord | None = None,
    leaks: str = "",
) -> Run:
    """Create the folder of a new run atomically; default names are `<model>-001` and so on.

    `leaks` is as in Run. `parent` describes the run whose weights the new run starts from. Raises
    AttnlmError if the name exists, UsageError if it can't be a folder's name.
    """
    facts = dataset_facts(dataset)
    if dataset.examples is not None and config.training.loss_on == "all":
        facts = replace(facts, bigram_loss=None, floor=None)  # which count the answers only
    run = Run(
        checkpoint_dir,
        config,
        vocab_size=dataset.vocab_size,
        parameters=parameters,
        dataset=facts,
        parent=parent,
        leaks=leaks,
        data_dir=data_dir,
    )
    return _create_folder(run, dataset.tokenizer, name)


def check_name_is_free(name: str, checkpoint_dir: Path, *, is_trained: bool = True) -> None:
    """Check a name before slow work begins: raise the error that `create_run` would raise later."""
    check_name(name)
    path = checkpoint_dir / name
    if os.path.lexists(path):
        resume = f", or resume it: {resume_command(path)}; `exist_ok` takes it"
        raise AttnlmError(
            f"a run called {name} exists, and runs are never overwritten",
            f"choose another `name`{resume if is_trained else ''}",
        )


def create_imported(
    config: Config,
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor],
    text: str,
    step: int,
    origin: str,
    name: str | None,
    checkpoint_dir: Path,
) -> Run:
    """Create a run of weights that were trained elsewhere, on a `text` of which only a name is
    known. `origin` is where they come from, the rest as in `create_run`."""
    run = Run(
        checkpoint_dir,
        config,
        vocab_size=tokenizer.vocab_size,
        parameters=sum(weight.numel() for weight in weights.values()),
        dataset=DatasetFacts(name=text),
        imported_from=origin,
    )
    facts = CheckpointFacts(step=step).content()
    return _create_folder(
        run,
        tokenizer,
        name,
        lambda folder: save_checkpoint(folder / "best.safetensors", weights, facts),
    )


def _create_folder(
    run: Run,
    tokenizer: Tokenizer,
    name: str | None,
    fill: Callable[[Path], object] = lambda folder: None,
) -> Run:
    """Make the folder of `run` in a temporary place, then move it into the folder `run.path`.

    `fill` writes more files to the temporary folder. If `name` is None, the run gets the first free
    name of `<model>-001`, `<model>-002`, … Raises as `create_run` does.
    """
    checkpoint_dir = run.path
    hint = ", or name another `checkpoint_dir`"
    with files.explaining_os_errors(checkpoint_dir, hint), workspace(checkpoint_dir) as work:
        folder = work / "new"
        folder.mkdir()
        files.write_json(folder / "tokenizer.json", tokenizer.to_json())
        for code in run.config.codes:
            (folder / CODE).mkdir(exist_ok=True)
            files.write_bytes(folder / CODE / code.file, code.content())
            code.remember(run.config.arguments_of(code))
        fill(folder)
        replace(run, path=folder).save_config()
        places = numbered_paths(checkpoint_dir, run.config.spec.name)
        if name is not None:
            check_name_is_free(name, checkpoint_dir, is_trained=not run.imported_from)
            places = iter([checkpoint_dir / name])
        path = move_to_free(folder, places)
        write_latest(checkpoint_dir, path.name)
    return replace(run, path=path)
