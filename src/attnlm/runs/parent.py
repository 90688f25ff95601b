"""The checkpoint of another run that a run's weights start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.data.dataset import Dataset
from attnlm.runs.checkpoint import load_rows
from attnlm.runs.run import Run


def start_record(parent: Run, checkpoint: str, dataset: Dataset) -> dict[str, Any]:
    """What a run on `dataset` records of the parent that it starts from, at this checkpoint.

    Raises AttnlmError where the data have another tokenizer, and as `Run.checkpoint` does.
    """
    if dataset.tokenizer.to_json() != parent.tokenizer.to_json():
        raise AttnlmError(
            f"{dataset.name} was not encoded with the tokenizer of {parent.name}, "
            "so that its ids mean other tokens",
            f"prepare its text again with `tokenizer` {parent.path}",
        )
    start = parent.checkpoint(checkpoint)
    return {
        "name": parent.name,
        "path": str(parent.path.absolute()),
        "checkpoint": start.path.name,
        "step": start.step,
        "sha256": _hash(start.path),
    }


def parent_rows(run: Run, rank: int = 0, count: int = 1) -> Mapping[str, Tensor]:
    """The weights that a run starts from: of each the rows that process `rank` of `count` has.

    Raises AttnlmError as `load_checkpoint` does, and where the parent was trained further since.
    """
    assert run.parent is not None
    path = Path(run.parent["path"]) / run.parent["checkpoint"]
    _, weights, _ = load_rows(path, run.config.model, run.vocab_size, rank, count)
    if _hash(path) != run.parent["sha256"]:
        raise AttnlmError(
            f"{path} has changed since {run.name} was to start from it",
            "wait until it is no longer trained, then start again",
        )
    return weights


def _hash(checkpoint: Path) -> str:
    """Of a file; of a sharded run's folder that of its facts.json, which has the others'."""
    path = checkpoint if checkpoint.suffix else checkpoint / "facts.json"
    try:
        return files.file_hash(path)
    except OSError as error:
        raise AttnlmError(
            f"can't read {path}: {error.strerror or error}", "check that it may be read"
        ) from None
