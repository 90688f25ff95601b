"""Files of ids: written block by block, while pairs of adjacent ids are counted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnlm.base.files import open_replacement
from attnlm.data.dataset import id_dtype

MOST_BIGRAM_IDS = 1024

Pairs = NDArray[np.int64] | None
"""How often each id (row) is followed by each id (column), (V, V); None for a large vocabulary."""


class Bin(NamedTuple):
    """Ids, (N,), and what they stand for. In the counts of a whole file, `ids` are its last ones.

    `utf8_bytes` is the length of their text in UTF-8, 0 for ids that are no text.
    """

    ids: NDArray[Any]
    tokens: int
    characters: int
    utf8_bytes: int
    pairs: Pairs


def count(
    ids: NDArray[Any],
    vocab_size: int,
    characters: int,
    utf8_bytes: int,
    is_counted: NDArray[np.bool_] | slice = slice(None),
) -> Bin:
    """Return ids with their counts. `is_counted` says for each id if its pair with the id before
    it is counted."""
    stored = ids.astype(id_dtype(vocab_size), copy=False)
    pairs_VV: Pairs = None
    if vocab_size <= MOST_BIGRAM_IDS:
        dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
        pairs = np.multiply(stored[:-1], vocab_size, dtype=dtype)
        pairs += stored[1:].astype(dtype)
        if not isinstance(is_counted, slice):
            pairs = pairs[is_counted[1:]]
        pairs_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    return Bin(stored, len(stored), characters, utf8_bytes, pairs_VV)


def write_bin(path: Path, blocks: Iterable[Bin]) -> Bin:
    """Write the ids of all blocks to a file, and return their counts."""
    counted: list[Bin] = []
    with open_replacement(path) as file:
        for block in blocks:
            file.write(block.ids.data)
            for before in counted:
                if block.pairs is not None and before.pairs is not None:
                    block.pairs[before.ids[-1], block.ids[0]] += 1
                    np.add(block.pairs, before.pairs, out=block.pairs)
                block = block._replace(
                    tokens=before.tokens + block.tokens,
                    characters=before.characters + block.characters,
                    utf8_bytes=before.utf8_bytes + block.utf8_bytes,
                )
            counted = [block]
    return counted[0] if counted else Bin(np.empty(0), 0, 0, 0, None)


def bigram_loss(train_VV: Pairs, val_VV: Pairs) -> float | None:
    """Return the loss of the validation split, in nats per token, with the bigram probabilities of
    the training split, given the pair counts of both.

    1 is added to each count of the training split. Return None without counts.
    """
    if train_VV is None or val_VV is None:
        return None
    smoothed_VV = train_VV + 1
    log_p_VV = np.log(smoothed_VV / smoothed_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val_VV * log_p_VV).sum() / val_VV.sum())  # never −0
