"""A prepared data set: opened, checked, and mapped to memory."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.commands import how_to_make
from attnlm.base.errors import AttnlmError
from attnlm.base.files import file_hash, open_regular, read_json, unless_replaced
from attnlm.base.folders import find_folder
from attnlm.base.names import is_safe_name
from attnlm.data.shards import MOST_SHARDS, Ids, Shards, check_unchanged, file_name, map_ids
from attnlm.tokens import tokenizer

# Of meta.json and the files beside it: one bin for each split, or several.
FORMAT, SHARDED_FORMAT = 1, 2

LONGEST_TEXT = 2**13  # characters, in meta.json
_MAX_META = 2**23  # bytes
_LARGE = 2**30  # bytes from which a bin is hashed by samples
_SAMPLES = 64
_SAMPLE = 2**20  # bytes
_DAMAGED = "prepare it again with `force`, or copy it again from where it came"


@dataclass(frozen=True)
class Dataset:
    """What `prepare` made of a text.

    `source` says where it came from, and `sources` are what was named: one, or several in order.
    `documents` counts those whose ends are marked by the end-of-text id.
    `train` and `val` are read-only arrays of ids on disk, shapes (train_tokens,), (val_tokens,).
    Ids in bins over 1 GiB are not all checked on opening: read them with `ids_at`.
    `val_bytes` is the length of the validation text in UTF-8; `bigram_loss`, of counted bigrams,
    and `floor`, the least possible, are in nats per token of the validation split, where known.
    `tokenizer_from` is the folder that the tokenizer was taken from, if it was not made for this.
    """

    path: Path
    name: str
    source: str
    sources: tuple[str, ...]
    source_sha256: str
    val_source: str | None
    val_source_sha256: str | None
    encoding: str
    newlines: str
    column: str
    documents: int
    val_fraction: float | None
    characters: int
    train_characters: int
    val_characters: int
    train_tokens: int
    val_tokens: int
    val_bytes: int
    train_sha256: str
    val_sha256: str
    vocab_size: int
    bigram_loss: float | None
    floor: float | None
    tokenizer_from: str | None
    tokenizer: tokenizer.Tokenizer
    train: Ids | Shards
    val: Ids | Shards

    def __repr__(self) -> str:
        return (
            f"<Dataset {self.name!r}: {self.vocab_size:,} ids ({self.tokenizer.name}), "
            f"{self.train_tokens:,} training and {self.val_tokens:,} validation tokens>"
        )

    @property
    def bytes_per_token(self) -> float:
        """Of the validation split, in UTF-8: what bits per byte are counted by."""
        return self.val_bytes / self.val_tokens

    @property
    def largest_block_size(self) -> int:
        """The longest context of which both splits hold a window and its targets."""
        return min(self.train_tokens, self.val_tokens) - 1


def open_dataset(
    path_or_name: str | Path | Dataset | None = None,
    *,
    data_dir: str | Path = "data",
    verify: bool = False,
) -> Dataset:
    """The data set of that name in `data_dir`, or at that path, or the one prepared last.

        dataset = attnlm.open_dataset("tales-char")

    All files' hashes are checked, of splits over 1 GiB by 64 samples unless `verify`, which opens
    an opened one again too. Raises AttnlmError where one of its files is missing or damaged.
    """
    if not isinstance(path_or_name, Dataset):
        path = find_folder(path_or_name, Path(data_dir), kind="data set")
    elif verify:
        path = path_or_name.path
    else:
        return path_or_name

    def open_and_check() -> Dataset:
        meta = read_meta(path / "meta.json")
        opened = _opened(path, meta)
        for split, ids in (("train", opened.train), ("val", opened.val)):
            _check_bins(path, split, ids, meta, verify)
        return opened

    return unless_replaced(path, open_and_check)


def open_trusted(path: Path) -> Dataset:
    """The data set in the folder `path`, the hashes of its bins not checked.

    For whoever computed or checked them a moment ago: it saves reading all of a large text again.
    """
    return unless_replaced(path, lambda: _opened(path, read_meta(path / "meta.json")))


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """How ids are stored: two bytes where they fit, else four, the low byte first."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def sampled_hash(*paths: Path) -> str:
    """Return the SHA-256 of at most 64 blocks of 1 MiB, or of one block of each of more files."""
    digest = hashlib.sha256()
    most = max(1, _SAMPLES // len(paths))
    for path in paths:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            count = min(most, math.ceil(size / _SAMPLE))
            for i in range(count):
                file.seek(max(0, size - _SAMPLE) * i // max(1, count - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def joint_hash(hashes: Sequence[str]) -> str:
    """What stands for a split in several files: the SHA-256 of theirs, in hexadecimal."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_count(value: object) -> bool:
    """Whether a JSON value is a plausible number of things."""
    return type(value) is int and 0 < value < 2**48


def _is_number(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _optional(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_valid(value)


_META: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: _is_text(value) and is_safe_name(value),
    "source": _is_text,
    "tokenizer_from": lambda value: value is None or isinstance(value, str),
    "sources": lambda value: isinstance(value, list) and all(isinstance(s, str) for s in value),
    "source_sha256": _is_hash,
    "val_source": _optional(_is_text),
    "val_source_sha256": _optional(_is_hash),
    "encoding": _is_text,
    "newlines": lambda value: value in ("keep", "unix"),
    "column": lambda value: isinstance(value, str),
    "documents": lambda value: value == 0 or is_count(value),
    "val_fraction": _optional(_is_number),
    "characters": is_count,
    "train_characters": is_count,
    "val_characters": is_count,
    "train_tokens": is_count,
    "val_tokens": is_count,
    "val_bytes": is_count,
    "train_sha256": _is_hash,
    "val_sha256": _is_hash,
    "train_sampled_sha256": _is_hash,
    "val_sampled_sha256": _is_hash,
    "tokenizer": _is_text,
    "tokenizer_sha256": _is_hash,
    "vocab_size": is_count,
    "dtype": lambda value: value in ("uint16", "uint32"),
    "bigram_loss": _optional(_is_number),
    "floor": _optional(_is_number),
}

_UNKNOWN_BEFORE: dict[str, Any] = {
    "newlines": "keep",
    "tokenizer_from": None,
    "column": "text",
    "documents": 0,
}


def _are_hashes(value: object) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MOST_SHARDS and all(map(_is_hash, value))


_SHARDED_META: dict[str, Callable[[Any], bool]] = {
    "shard_tokens": is_count,
    "train_shards": _are_hashes,
    "val_shards": _are_hashes,
}


def read_meta(path: Path) -> dict[str, Any]:
    """What meta.json says, every value of the right kind."""
    if not path.is_file():
        raise AttnlmError(
            f"{path.parent} is not a data set: it has no {path.name}",
            how_to_make("data set", path.parent.parent),
        )
    meta = read_json(path, _MAX_META)
    if meta.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise AttnlmError(
            f"{path} has a format that this version of attnlm doesn't know",
            "prepare the text again with `force`, or install a newer attnlm",
        )
    # What earlier versions wrote lacks these.
    meta = {"sources": [meta.get("source")], **_UNKNOWN_BEFORE, **meta}
    is_sharded = meta["format"] == SHARDED_FORMAT
    for key, is_valid in (_META | _SHARDED_META if is_sharded else _META).items():
        if key not in meta or not is_valid(meta[key]):
            raise AttnlmError(f"{path} is damaged: its {key!r} is missing or wrong", _DAMAGED)
    for split in ("train", "val") if is_sharded else ():
        hashes = meta[f"{split}_shards"]
        if (
            len(hashes) != -(-meta[f"{split}_tokens"] // meta["shard_tokens"])
            or joint_hash(hashes) != meta[f"{split}_sha256"]
        ):
            raise AttnlmError(f"{path} is damaged: its {split} shards are wrong", _DAMAGED)
    return meta


def _opened(path: Path, meta: dict[str, Any]) -> Dataset:
    bins = {split: open_bins(path, split, meta) for split in ("train", "val")}
    fields = {key: meta[key] for key in meta if key in Dataset.__dataclass_fields__}
    fields |= {"path": path, "sources": tuple(meta["sources"])}
    return Dataset(**{**fields, "tokenizer": _open_tokenizer(path, meta), **bins})


def open_bins(folder: Path, split: str, meta: dict[str, Any]) -> Ids | Shards:
    """The ids of a split, unread. Raises AttnlmError where a file is missing or cut short."""
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    paths, left = _bin_paths(folder, split, meta), meta[f"{split}_tokens"]
    if meta["format"] == FORMAT:
        return _open_bin(paths[0], dtype, left)
    each = meta["shard_tokens"]
    return Shards(
        [_open_bin(path, dtype, min(each, left - i * each)) for i, path in enumerate(paths)]
    )


def _bin_paths(folder: Path, split: str, meta: dict[str, Any]) -> list[Path]:
    if meta["format"] == FORMAT:
        return [folder / file_name(split)]
    return [folder / file_name(split, i) for i in range(len(meta[f"{split}_shards"]))]


def _open_bin(path: Path, dtype: np.dtype[Any], tokens: int) -> Ids:
    with _reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != tokens * dtype.itemsize:
            raise AttnlmError(f"{path} is damaged: it has {size:,} bytes", _DAMAGED)
        return map_ids(file, dtype, tokens)


def _check_bins(
    folder: Path, split: str, ids: Ids | Shards, meta: dict[str, Any], verify: bool
) -> None:
    paths = _bin_paths(folder, split, meta)
    if ids.nbytes > _LARGE and not verify:
        with _reading(paths[0]):
            intact = sampled_hash(*paths) == meta[f"{split}_sampled_sha256"]
        if not intact:
            shown = paths[0] if len(paths) == 1 else f"one of {folder / split}-*.bin"
            raise AttnlmError(f"{shown} is damaged: it doesn't match its hash", _DAMAGED)
        return
    hashes = meta.get(f"{split}_shards", [meta[f"{split}_sha256"]])
    parts = ids.parts if isinstance(ids, Shards) else [ids]
    for path, expected, part in zip(paths, hashes, parts, strict=True):
        with _reading(path):
            intact = file_hash(path) == expected
        if not intact:
            raise AttnlmError(f"{path} is damaged: it doesn't match its hash", _DAMAGED)
        ids_at(part, slice(None), meta["vocab_size"], str(path))


def ids_at(
    ids: NDArray[Any] | Shards, places: slice | NDArray[Any], vocab_size: int, origin: str
) -> NDArray[Any]:
    """Return the ids at those places; `origin` is the name of what they come from.

    Raises AttnlmError if a file was written to since, or an id is not below `vocab_size`.
    """
    check_unchanged(ids)
    found: NDArray[Any] = ids[places]
    if found.size and int(found.max()) >= vocab_size:
        origin = origin.replace(".bin", "-*.bin") if isinstance(ids, Shards) else origin
        raise AttnlmError(
            f"{origin} is damaged: it has ids that its vocabulary of {vocab_size:,} lacks", _DAMAGED
        )
    return found


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AttnlmError(f"can't read {path}: {error.strerror}", _DAMAGED) from None


def _open_tokenizer(folder: Path, meta: dict[str, Any]) -> tokenizer.Tokenizer:
    path = folder / "tokenizer.json"
    loaded = tokenizer.load(path)
    with _reading(path):
        digest = file_hash(path)
    if (
        digest != meta["tokenizer_sha256"]
        or loaded.name != meta["tokenizer"]
        or loaded.vocab_size != meta["vocab_size"]
    ):
        raise AttnlmError(f"{path} is not the tokenizer of this data set", _DAMAGED)
    loaded.dataset = meta["name"]
    return loaded
