"""The list of all data sets in a folder. This module does not need torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.base.folders import folder_size, link_target, modified, newest_first, problem_of
from attnlm.data.dataset import open_bin, read_meta

# A folder with any of these files is a data set, perhaps a damaged one.
_OF_A_DATASET = ("meta.json", "train.bin", "val.bin")
_FACTS = ("source", "tokenizer", "vocab_size", "train_tokens", "val_tokens", "bigram_loss", "floor")


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """An entry of `list_datasets`: a data set, perhaps damaged. None stands for unknown values."""

    name: str
    path: Path
    source: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    train_tokens: int | None = None
    val_tokens: int | None = None
    bigram_loss: float | None = None
    """The loss of bigrams that were counted in the training split, in nats per token."""
    floor: float | None = None
    """The least possible loss, in nats per token."""
    bytes: int = 0
    """The size of all files in the folder; 0 for a link."""
    modified: float = 0.0
    """The time when the data set was prepared, in seconds since 1970."""
    link: str | None = None
    """The target of the link, if `path` is a link."""
    is_latest: bool = False
    """True if commands use this data set when no data set is named."""
    problem: str | None = None
    """The reason why the data set can't be read; None if it can."""


def list_datasets(
    data_dir: str | Path = "data", *, on_event: OnEvent | None = None
) -> list[DatasetEntry]:
    """Return the data sets in a folder, newest first; damaged ones have a `problem`.

        large = [entry.name for entry in attnlm.list_datasets() if entry.bytes > 10**9]

    Hashes are not checked. Folders that are not data sets are left out; `on_event` receives a Note
    with their names. Raises AttnlmError if `data_dir` can't be read.
    """
    entries, others = newest_first(Path(data_dir), _entry)
    if others and on_event is not None:
        on_event(Note(f"skipped (not a data set): {', '.join(others)}"))
    return entries


def _entry(path: Path) -> DatasetEntry | None:
    """Return the data set in a folder, even if it is damaged; None for other folders."""
    link = link_target(path)
    found = DatasetEntry(name=path.name, path=path, link=link)
    if problem := problem_of(path):
        return replace(found, problem=problem)
    if not any(os.path.lexists(path / name) for name in _OF_A_DATASET):
        return None
    size = 0 if link is not None else folder_size(path)
    found = replace(found, bytes=size, modified=modified(path / "meta.json"))
    try:
        meta = read_meta(path)
        for split in ("train", "val"):
            open_bin(path, split, meta)
    except AttnlmError as error:
        return replace(found, problem=error.message)
    except OSError as error:
        return replace(found, problem=f"it cannot be read: {error.strerror}")
    return replace(found, **{fact: getattr(meta, fact) for fact in _FACTS})
