"""Data sets of ids that the user made: they are no text, and are copied as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress
from attnlm.base.files import file_hash, open_given, open_replacement
from attnlm.data.bin_files import MOST_BIGRAM_IDS, bigram_loss
from attnlm.data.dataset import id_dtype
from attnlm.data.new_dataset import UnencodedDataset
from attnlm.text.corpus import Corpus, safe_name
from attnlm.tokens.tokenizer import Tokenizer

SUFFIXES = (".npy", ".bin")
_AT_ONCE = 2**20  # ids that are in memory


def dataset_from_ids(
    path: Path,
    val_path: Path | None,
    fraction: Fraction,
    vocab_size: int,
    dtype: str,
    on_event: OnEvent,
) -> UnencodedDataset:
    """Return the data set of a file of ids, and of another one for validation, if given.

    `dtype` is that of a .bin file. Raises AttnlmError for a file that is no list of ids, and for an
    id that is not below `vocab_size`.
    """
    train = _read(path, dtype, vocab_size)
    if val_path is None:
        size = int(len(train) * (1 - fraction))
        train, val = train[:size], train[size:]
    else:
        val = _read(val_path, dtype, vocab_size)
    for ids, title in ((train, "training"), (val, "validation")):
        if len(ids) < 2:
            raise AttnlmError(
                f"the {title} split of {path} has fewer than two ids",
                "use a longer file" + ("" if val_path else ", or another `val_fraction`"),
            )
    corpora = [Corpus(safe_name(p.stem), (str(p),), ()) for p in (path, val_path) if p]
    return UnencodedDataset(
        corpora[0],
        corpora[1] if val_path else None,
        {
            "source_sha256": file_hash(path),
            "val_source_sha256": file_hash(val_path) if val_path else None,
            "split": None if val_path else "tail",
            "val_fraction": None if val_path else float(fraction),
            "documents": 0,
            "characters": len(train) + len(val),
            "train_characters": len(train),
            "val_characters": len(val),
        },
        alphabet="",
        sample=list,
        has_ends=False,
        encode=functools.partial(_write, train, val, on_event),
    )


def _read(path: Path, dtype: str, vocab_size: int) -> NDArray[Any]:
    """Map a file of ids to memory, and check them, (N,)."""
    with open_given(path) as file:
        size = file.seek(0, 2)
    try:
        if path.suffix.lower() == ".npy":
            ids: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            ids = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split()) if size else "it is empty"
        raise AttnlmError(f"{path} holds no ids: {reason}", "check the file and `dtype`") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise AttnlmError(
            f"{path} holds an array of {ids.dtype} with {ids.ndim} dimensions",
            "save whole numbers in one dimension: numpy.save(path, ids)",
        )
    for begin, block in _blocks(ids):
        if len(wrong := np.flatnonzero((block < 0) | (block >= vocab_size))):
            raise AttnlmError(
                f"id {block[wrong[0]]} at place {begin + wrong[0]:,} of {path} is not from 0 to "
                f"{vocab_size - 1:,}",
                "correct the file, `vocab_size` or `dtype`",
            )
    return ids


def _blocks(ids: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for begin in range(0, len(ids), _AT_ONCE):
        yield begin, ids[begin : begin + _AT_ONCE]


def _write(
    train: NDArray[Any], val: NDArray[Any], on_event: OnEvent, folder: Path, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Copy the ids to train.bin and val.bin in `folder`."""
    counts = []
    size, total, done = tokenizer.vocab_size, len(train) + len(val), 0
    for key, ids in (("train", train), ("val", val)):
        pairs = np.zeros(size**2 if size <= MOST_BIGRAM_IDS else 0, np.int64)
        with open_replacement(folder / f"{key}.bin") as file:
            for begin, block in _blocks(ids):
                file.write(block.astype(id_dtype(size)).tobytes())
                done += len(block)
                on_event(Progress("copy", done, total, "ids"))
                if len(pairs):
                    first = ids[begin : begin + len(block) + 1].astype(np.int64)
                    pairs += np.bincount(first[:-1] * size + first[1:], minlength=size**2)
        counts.append(pairs.reshape(size, size) if len(pairs) else None)
    return {
        "train_tokens": len(train),
        "val_tokens": len(val),
        "val_bytes": 0,
        "bigram_loss": bigram_loss(*counts),
        "floor": None,
    }
