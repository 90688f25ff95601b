"""Open and list prepared data sets: check their files, and map their ids to memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent
from attnlm.base.files import file_hash
from attnlm.base.folders import (
    DATA_DIR,
    FolderEntry,
    find_folder,
    how_to_make,
    newest_first,
    put_back,
    read_entry,
)
from attnlm.base.setting_fields import limited, read_record
from attnlm.data.examples import LONGER, Examples, encode_examples, read_longer, read_marks
from attnlm.text.corpus import summary
from attnlm.tokens.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1  # of meta.json, and of the files that it describes
_LARGE = 2**30  # bytes of a split, above which opening does not read it
_DAMAGED = "prepare it again with `force`, or copy it again from its source"

Ids: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class ExampleFacts:
    """The properties of a data set of examples, which are questions with answers."""

    train: int = limited(at_least=1)
    """the number of training examples"""
    val: int = limited(at_least=1)
    longer: int = limited(default=0, at_least=0)
    """the number of longer examples, in longer.jsonl"""
    question_end: str = limited(default="")
    """the text between a question and its answer"""
    answer_end: str = limited(default="")
    """the text that ends an answer; "" for the end-of-text id"""
    val_answer_tokens: int = limited(at_least=1, below=2**48)
    val_answer_bytes: int = limited(at_least=1, below=2**53)


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of meta.json: the properties of a data set, which `Dataset` explains."""

    name: str = ""
    sources: tuple[str, ...]
    source_sha256: str
    val_source: str | None
    val_source_sha256: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    documents: int = limited(default=0, at_least=0)
    val_fraction: float | None = limited(above=0, below=1)
    split: str | None = limited(choices=("tail", "documents"))
    characters: int = limited(at_least=1)
    train_characters: int = limited(default=0, at_least=1)
    val_characters: int = limited(default=0, at_least=1)
    train_tokens: int = limited(default=0, at_least=1, below=2**48)
    val_tokens: int = limited(default=0, at_least=1, below=2**48)
    val_bytes: int = limited(default=0, at_least=0, below=2**53)
    tokenizer_name: str = ""
    tokenizer_from: str | None = None
    vocab_size: int = limited(default=0, at_least=1)
    dtype: str = limited(default="", choices=("uint16", "uint32"))
    bigram_loss: float | None = limited(default=None, at_least=0)
    floor: float | None = limited(default=None, at_least=0)
    examples: ExampleFacts | None = None
    files: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return summary(self.sources)

    @property
    def train_sha256(self) -> str:
        return str(self.files.get("train.bin"))

    @property
    def val_sha256(self) -> str:
        return str(self.files.get("val.bin"))


@dataclass(frozen=True, kw_only=True)
class Dataset(Meta):
    """A text that `prepare` encoded: its ids, its tokenizer and its properties.

        dataset = attnlm.open_dataset("tales-char")
        dataset.train[:10], dataset.tokenizer.decode(dataset.val[:100])

    `train` and `val` are the ids of the splits: read-only NumPy arrays of shapes (train_tokens,)
    and (val_tokens,), of uint16, or uint32 for large vocabularies. They are mapped to memory
    (numpy.memmap), so a split of any size opens fast. `tokenizer` converts ids to text and back.

    `source` names the origin of the text; `sources` lists the origins if there were several.
    `options` are those that were given to `prepare`, without the tokenizer. `documents` counts the
    documents that the end-of-text id follows, or that were divided among the splits. `split` says
    which part of the text is for validation: its "tail", or some of its "documents"; None stands
    for a text of its own, `val_source`. `val_bytes` is the length of the validation text in UTF-8,
    0 for ids that are no text. `bigram_loss` (the loss of bigrams counted in the training split)
    and `floor` (the least possible loss) are in nats per token of the validation split; None stands
    for unknown. `tokenizer_from` is the folder of the run or data set from which the tokenizer was
    taken, if any. `source_sha256` covers the text in UTF-8, the end of each document that an
    end-of-text id follows, and where answers begin and end. `val_source_sha256` covers the same for
    a validation text that has its own source. `files` has the SHA-256 of each file.

    `examples` describes a data set of questions with answers, whose losses are those of the
    answers; `train_examples` and `val_examples` are the places of the examples. All three are None
    for a text.
    """

    path: Path
    tokenizer: Tokenizer
    train: Ids
    val: Ids
    train_examples: Examples | None = None
    val_examples: Examples | None = None

    def __repr__(self) -> str:
        return (
            f"<Dataset {self.name!r}: {self.vocab_size:,} ids ({self.tokenizer.name}), "
            f"{self.train_tokens:,} training and {self.val_tokens:,} validation tokens>"
        )

    @property
    def bytes_per_token(self) -> float:
        """Return the UTF-8 bytes per token of the validation split, to compute bits per byte.

        It is 0 for ids that are no text.
        """
        return self.val_bytes / self.val_tokens

    @property
    def bytes_per_answer_token(self) -> float:
        """Return the UTF-8 bytes per token of the validation answers; of a text, of all tokens."""
        if self.examples is None:
            return self.bytes_per_token
        return self.examples.val_answer_bytes / self.examples.val_answer_tokens

    def longer_examples(self) -> tuple[Ids, Examples] | None:
        """Return the ids, (N,), and the places of a task's longer examples; None if it has none.

        Raises AttnlmError if their file is missing or damaged.
        """
        if self.examples is None or not self.examples.longer:
            return None
        text = read_longer(checked_file(self.path, LONGER, self))
        return encode_examples(text, self.tokenizer, self.examples.answer_end)[:2]

    @property
    def largest_block_size(self) -> int:
        """Return the longest context for which both splits have a window and its targets.

        A window of examples may end behind the last token of the split.
        """
        return sys.maxsize if self.train_examples else min(self.train_tokens, self.val_tokens) - 1


def open_dataset(
    path_or_name: str | Path | Dataset | None = None,
    *,
    data_dir: str | Path = DATA_DIR,
    verify: bool = False,
) -> Dataset:
    """Open a data set by its name in `data_dir` or by its path; by default the last prepared one.

        dataset = attnlm.open_dataset("tales-char")

    The hash of each file is checked; of a split over 1 GiB, only its size, unless `verify` is true.
    A Dataset that is open already is returned as it is
    if `verify` is false, and opened again if `verify` is true. Raises AttnlmError if a file is
    missing or damaged.
    """
    if not isinstance(path_or_name, Dataset):
        path = find_folder(path_or_name, Path(data_dir), kind="data set")
    elif verify:
        path = path_or_name.path
    else:
        return path_or_name
    return open_dataset_folder(path, verify=verify)


def open_dataset_folder(path: Path, *, verify: bool = False, trusted: bool = False) -> Dataset:
    """Open the data set in the folder `path`; if `trusted`, do not compare the hashes of its bins.

    A data set that was just written or checked is trusted: reading a large one takes long.
    """
    meta = read_meta(path)
    try:
        tokenizer = load_tokenizer(path / "tokenizer.json")
        actual = file_hash(path / "tokenizer.json"), tokenizer.name, tokenizer.vocab_size
        if actual != (meta.files.get("tokenizer.json"), meta.tokenizer_name, meta.vocab_size):
            raise AttnlmError(
                f"{path / 'tokenizer.json'} is not the tokenizer of this data set", _DAMAGED
            )
        tokenizer.dataset = meta.name
        bins = {split: open_bin(path, split, meta) for split in ("train", "val")}
        for split, ids in () if trusted else bins.items():
            if verify or ids.nbytes <= _LARGE:
                file = checked_file(path, f"{split}.bin", meta)
                ids_at(ids, slice(None), meta.vocab_size, str(file))
        marks: dict[str, Any] = {}
        if meta.examples is not None:
            for split, ids in bins.items():
                file = checked_file(path, f"{split}.marks", meta)
                marks[f"{split}_examples"] = read_marks(file, len(ids))
    except OSError as error:
        unread = error.filename or path
        raise AttnlmError(f"cannot read {unread}: {error.strerror}", _DAMAGED) from None
    values: dict[str, Any] = {**vars(meta), **bins, **marks}
    return Dataset(path=path, tokenizer=tokenizer, **values)


def checked_file(folder: Path, name: str, meta: Meta) -> Path:
    """Return the path of a data set's file. Raises AttnlmError unless it is what was recorded."""
    path = folder / name
    if not path.is_file():
        raise AttnlmError(f"{path} is missing", _DAMAGED)
    if file_hash(path) != meta.files.get(name):
        raise AttnlmError(f"{path} is damaged: it does not match its hash", _DAMAGED)
    return path


def read_meta(folder: Path) -> Meta:
    """Return the content of meta.json. Raises AttnlmError if it is missing, damaged or foreign."""
    path = folder / "meta.json"
    if not path.is_file():
        raise AttnlmError(
            f"{folder} is not a data set: it has no meta.json",
            how_to_make("data set", folder.parent),
        )
    return read_record(Meta, path, format=FORMAT, hint=_DAMAGED, sealed=True)


def open_bin(folder: Path, split: str, meta: Meta) -> Ids:
    """Map a split's file to memory without reading it. Raises AttnlmError for a wrong size."""
    path = folder / f"{split}.bin"
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    tokens: int = getattr(meta, f"{split}_tokens")
    size = path.stat().st_size
    expected = tokens * dtype.itemsize
    if size != expected:
        raise AttnlmError(f"{path} is damaged: it has {size:,} bytes, not {expected:,}", _DAMAGED)
    ids: np.memmap[Any, Any] = np.memmap(path, dtype, mode="r", shape=(tokens,))
    return ids


def ids_at(
    ids: NDArray[Any], places: slice | NDArray[Any], vocab_size: int, origin: str
) -> NDArray[Any]:
    """Return the ids at `places`; `origin` is the name of their file in messages.

    Raises AttnlmError if an id is not below `vocab_size`: opening a large file does not check all
    of its ids.
    """
    chosen: NDArray[Any] = ids[places]
    if chosen.size and int(chosen.max()) >= vocab_size:
        raise AttnlmError(
            f"{origin} is damaged: it has ids outside of its vocabulary of {vocab_size:,}", _DAMAGED
        )
    return chosen


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that ids are stored in: 2 bytes if they fit, else 4, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def evenly_spaced(total: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of the numbers below `total`, evenly spaced from 0 on."""
    count = min(total, most)
    return np.arange(count) * total // count


# --- The list of data sets -----------------------------------------------------------------------

# A folder with any of these files is a data set, perhaps a damaged one.
_DATASET_FILES = ("meta.json", "train.bin", "val.bin")


@dataclass(frozen=True, kw_only=True)
class DatasetEntry(FolderEntry):
    """An entry of `list_datasets`: a data set, perhaps damaged. None stands for unknown values."""

    source: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    train_tokens: int | None = None
    val_tokens: int | None = None
    split: str | None = None
    """tail or documents: the part of the text that is for validation; None for a text of its own"""
    bigram_loss: float | None = None
    """The loss of bigrams that were counted in the training split, in nats per token."""
    floor: float | None = None
    """The least possible loss, in nats per token."""


def list_datasets(
    data_dir: str | Path = DATA_DIR, *, on_event: OnEvent | None = None
) -> list[DatasetEntry]:
    """Return the data sets in a folder, newest first; damaged ones have a `problem`.

        large = [entry.name for entry in attnlm.list_datasets() if entry.bytes > 10**9]

    Hashes are not checked. Folders that are not data sets are left out; `on_event` receives a Note
    with their names. Raises AttnlmError if `data_dir` can't be read.
    """
    put_back(Path(data_dir))
    return newest_first(Path(data_dir), _dataset_entry, "data set", on_event)


def _dataset_entry(path: Path) -> DatasetEntry | None:
    """Return the data set in a folder, even if it is damaged; None for other folders."""
    if not any(os.path.lexists(path / name) for name in _DATASET_FILES):
        return None

    def read_values() -> dict[str, Any]:
        meta = read_meta(path)
        for split in ("train", "val"):
            open_bin(path, split, meta)
        listed = DatasetEntry.__annotations__.keys() - {"tokenizer"}
        return {name: getattr(meta, name) for name in listed} | {"tokenizer": meta.tokenizer_name}

    return read_entry(DatasetEntry(name=path.name, path=path), ["meta.json"], read_values)
