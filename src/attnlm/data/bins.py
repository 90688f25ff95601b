"""Splits to files of ids, with their pairs counted on the way."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress
from attnlm.base.files import replacing
from attnlm.base.pieces import cores, map_ahead
from attnlm.data.dataset import Ids, id_dtype
from attnlm.data.splits import Split
from attnlm.tokens.tokenizer import (
    PIECE,
    BpeTokenizer,
    Tokenizer,
    UnknownCharactersError,
    safe_pieces,
)
from attnlm.tokens.word_table import PieceEncoder, piece_encoder

_MOST_BIGRAM_IDS = 1024
_MOST_WORKERS = 8
_PIECE = PIECE  # characters encoded at once


@dataclass(frozen=True)
class Bin:
    """A file of ids that was written; `utf8_bytes` are those of the text.

    `pair_counts`, shape (V, V), says how often each id (row) is followed by each (column); it is
    None for large vocabularies.
    """

    tokens: int
    utf8_bytes: int
    sha256: str
    pair_counts: NDArray[np.int64] | None


def write_bins(
    folder: Path, split: Split, tokenizer: Tokenizer, on_event: OnEvent
) -> dict[str, Bin]:
    """Encodes both splits. Raises AttnlmError when one of them has less than two tokens."""
    done = 0

    def count(characters: int) -> None:
        nonlocal done
        done += characters
        on_event(Progress("encode", done, split.characters, "chars"))

    encode_piece = piece_encoder(tokenizer, split.utf8_bytes)
    bins = {}
    for key, pieces in itertools.groupby(split.pieces(), itemgetter(0)):
        try:
            bins[key] = _write_bin(
                folder / f"{key}.bin", map(itemgetter(1), pieces), tokenizer, encode_piece, count
            )
        except UnknownCharactersError:  # the vocabulary was that of the whole text
            text = split.val_text if key == "val" and split.val_text else split.text
            raise text.changed() from None
    for key, title in (("train", "training"), ("val", "validation")):
        if key not in bins or bins[key].tokens < 2:
            text = split.val_text if key == "val" and split.val_text else split.text
            raise AttnlmError(
                f"the {title} split of {text.corpus.shown} has less than two tokens",
                "give a longer text" + ("" if split.val_text else ", or another `val_fraction`"),
            )
    return bins


@dataclass(frozen=True)
class _Encoded:
    """The ids of a piece of text, as they are stored, and what was counted on the way."""

    ids: Ids
    characters: int
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None  # shape (V, V)


def _write_bin(
    path: Path,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    encode_piece: PieceEncoder,
    count: Callable[[int], None],
) -> Bin:
    tokens = utf8_bytes = 0
    digest = hashlib.sha256()
    pairs = _Pairs(tokenizer.vocab_size)
    workers = 1  # this thread, which reads, hashes and writes, has as much to do
    if isinstance(tokenizer, BpeTokenizer):
        texts = safe_pieces(texts, _PIECE)
        workers = min(cores(), _MOST_WORKERS)
    encode = functools.partial(_encode, encode_piece, tokenizer.vocab_size)
    encoding = map_ahead(encode, texts, workers)
    with replacing(path) as file, contextlib.closing(encoding):
        for piece in encoding:
            file.write(piece.ids.data)
            digest.update(piece.ids.data)
            tokens += len(piece.ids)
            utf8_bytes += piece.utf8_bytes
            pairs.add(piece)
            count(piece.characters)
    return Bin(tokens, utf8_bytes, digest.hexdigest(), pairs.counts_VV)


def _encode(encode_piece: PieceEncoder, vocab_size: int, text: str) -> _Encoded:
    ids = encode_piece(text)
    return _Encoded(
        ids.astype(id_dtype(vocab_size), copy=False),
        len(text),
        len(text) if text.isascii() else len(text.encode()),
        _pair_counts(ids, vocab_size),
    )


class _Pairs:
    """How often each id (row) is followed by each (column); None for large vocabularies."""

    def __init__(self, vocab_size: int) -> None:
        shape = (vocab_size, vocab_size)
        self.counts_VV = np.zeros(shape, np.int64) if vocab_size <= _MOST_BIGRAM_IDS else None
        self._before: Ids | None = None

    def add(self, piece: _Encoded) -> None:
        """Counts the pairs in the next piece, and the one across its beginning."""
        if self.counts_VV is None or piece.pair_counts is None:
            return
        self.counts_VV += piece.pair_counts
        if self._before is not None:
            self.counts_VV[self._before[-1], piece.ids[0]] += 1
        self._before = piece.ids


def _pair_counts(
    ids: NDArray[np.unsignedinteger[Any]], vocab_size: int
) -> NDArray[np.int64] | None:
    """How often each id is followed by each, shape (V, V); None for large vocabularies."""
    if vocab_size > _MOST_BIGRAM_IDS:
        return None
    dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
    pairs = np.multiply(ids[:-1], vocab_size, dtype=dtype)
    pairs += ids[1:]
    return np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)


def bigram_loss(train: Bin, val: Bin) -> float | None:
    """Nats per validation token of training counts plus one; None for large vocabularies."""
    if train.pair_counts is None or val.pair_counts is None:
        return None
    counts_VV = train.pair_counts + 1
    log_p_VV = np.log(counts_VV / counts_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val.pair_counts * log_p_VV).sum() / val.pair_counts.sum())  # never −0
