"""The checkpoint of another run that a run's weights start from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.data.dataset import Dataset
from attnlm.runs.checkpoint import load_header, save_weights_in_turn
from attnlm.runs.load_model import load_weights
from attnlm.runs.open_run import open_run
from attnlm.runs.run import COPY_THE_RUN, Parent, Run
from attnlm.runs.safetensors_file import explaining_reads
from attnlm.runs.sharded_checkpoint import FACTS


def check_tokenizer(parent: Run, dataset: Dataset) -> None:
    """Raise AttnlmError if the data set was not encoded with the parent's tokenizer."""
    if dataset.tokenizer.to_json() != parent.tokenizer.to_json():
        raise AttnlmError(
            f"{dataset.name} was not encoded with the tokenizer of {parent.name}",
            f"prepare its text again with `tokenizer` {parent.path}",
        )


def parent_record(parent: Run, checkpoint: str) -> dict[str, Any]:
    """Return what a run records about its parent. Raises as `Run.checkpoint` does."""
    start = parent.checkpoint(checkpoint)
    return asdict(
        Parent(
            name=parent.name,
            path=str(parent.path.absolute()),
            checkpoint=start.path.name,
            step=start.step,
            sha256=_hash(start.path),
        )
    )


def parent_rows(run: Run, rank: int = 0, count: int = 1) -> Mapping[str, Tensor]:
    """Return the weights that a run starts from, or the rows of process `rank` of `count`.

    Raises AttnlmError as `load_checkpoint` does, and if the parent was trained further.
    """
    parent, start = _start(run)
    weights = load_weights(parent, parent.checkpoint(start.stem), rank, count)
    _check_unchanged(start, run)
    return weights


def keep_base(run: Run) -> Run:
    """Add the parent's weights to the folder of a run of adapters; return it with their digest.

    The weights are a hard link to the parent's file if this file holds only these weights and the
    file system supports links. Raises as `parent_rows` does, and OSError.
    """
    parent, start = _start(run)
    assert run.parent is not None
    if start == parent.best and start.suffix and parent.config.training.adapters is None:
        try:
            os.link(start.resolve(), run.base)
        except OSError:
            with files.open_regular(start) as original, files.replacing(run.base) as copy:
                shutil.copyfileobj(original, copy)
        _check_unchanged(run.base, run)
    else:
        weights = parent_rows(run)
        shapes = {name: tuple(values.shape) for name, values in weights.items()}
        facts = {"step": run.parent["step"]}
        save_weights_in_turn(run.base, shapes, weights.__getitem__, facts)
    base = load_header(run.base, run.config.model, run.vocab_size)
    return replace(run, parent={**run.parent, "base": base.digest})


def _start(run: Run) -> tuple[Run, Path]:
    assert run.parent is not None
    parent = open_run(Path(run.parent["path"]))
    return parent, parent.path / run.parent["checkpoint"]


def _check_unchanged(path: Path, run: Run) -> None:
    assert run.parent is not None
    if _hash(path) != run.parent["sha256"]:
        raise AttnlmError(
            f"{run.parent['name']} has changed since {run.name} was created from it",
            "wait until its training has ended, then start again",
        )


def _hash(checkpoint: Path) -> str:
    """Return the hash of a file, or of a sharded run's facts.json, which lists the other hashes."""
    path = checkpoint if checkpoint.suffix else checkpoint / FACTS
    with explaining_reads(path, "", COPY_THE_RUN):
        return files.file_hash(path)
