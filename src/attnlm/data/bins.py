"""Splits to files of ids, with their pairs counted on the way."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from attnlm.data.dataset import id_dtype, joint_hash
from attnlm.data.documents import encode_documents, safe_documents
from attnlm.data.shards import Ids, file_name
from attnlm.data.splits import Split, cut
from attnlm.data.unfinished import DamagedLogError, Log, Shard
from attnlm.text.documents import Piece
from attnlm.tokens.tokenizer import PIECE, BpeTokenizer, Tokenizer, UnknownCharactersError
from attnlm.tokens.word_table import PieceEncoder, piece_encoder

SHARD_BYTES = 2**30  # of each shard, and of a text above which there are shards
_MOST_BIGRAM_IDS = 1024
_MOST_WORKERS = 8
_PIECE = PIECE  # characters encoded at once
_BLOCK = 2**20  # ids read back at once


@dataclass(frozen=True)
class Bin:
    """A split that was written, to one file or several; `utf8_bytes` are those of its text.

    `pair_counts`, shape (V, V), says how often each id (row) is followed by each (column); it is
    None for large vocabularies.
    """

    paths: tuple[Path, ...]
    hashes: tuple[str, ...]
    tokens: int
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None

    @property
    def sha256(self) -> str:
        """Of the file, or of the hashes of several."""
        return joint_hash(self.hashes) if self.is_sharded else self.hashes[0]

    @property
    def is_sharded(self) -> bool:
        return self.paths[0].name not in ("train.bin", "val.bin")


def shard_tokens(vocab_size: int) -> int:
    """How many ids a shard has."""
    return SHARD_BYTES // id_dtype(vocab_size).itemsize


def write_bins(
    folder: Path, split: Split, tokenizer: Tokenizer, on_event: OnEvent, log: Log | None = None
) -> dict[str, Bin]:
    """Encodes both splits: each to one file, or with `log` to shards, from where that ends.

    Raises AttnlmError when one of them has less than two tokens.
    """
    done = 0

    def count(characters: int) -> None:
        nonlocal done
        done += characters
        on_event(Progress("encode", done, split.characters, "chars"))

    encode_piece = piece_encoder(tokenizer)
    bins = {}
    for key, pieces in itertools.groupby(split.pieces(), itemgetter(0)):
        text = split.text_of(key)
        encode = functools.partial(_encode, encode_piece, tokenizer, text.corpus.has_documents)
        try:
            bins[key] = _write_split(
                folder, key, map(itemgetter(1), pieces), tokenizer, encode, count, log
            )
        except UnknownCharactersError:  # the vocabulary was that of the whole text
            raise text.changed() from None
    for key, title in (("train", "training"), ("val", "validation")):
        if key not in bins or bins[key].tokens < 2:
            raise AttnlmError(
                f"the {title} split of {split.text_of(key).corpus.shown} has less than two tokens",
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


def _write_split(
    folder: Path,
    key: str,
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    encode: Callable[[Piece], _Encoded],
    count: Callable[[int], None],
    log: Log | None,
) -> Bin:
    shards = list(log.shards[key]) if log else []
    pairs = _Pairs(tokenizer.vocab_size)
    if shards:
        pieces = _from_place(pieces, shards[-1].characters, count)
        pairs.add_written(folder, key, shards)
    workers = 1  # this thread, which reads, hashes and writes, has as much to do
    if isinstance(tokenizer, BpeTokenizer):
        pieces = safe_documents(pieces, _PIECE)
        workers = min(cores(), _MOST_WORKERS)
    most = shard_tokens(tokenizer.vocab_size) if log else 2**63
    paths = [folder / file_name(key, i) for i in range(len(shards))]
    with contextlib.closing(map_ahead(encode, pieces, workers)) as encoding:
        feed = _Feed(encoding, shards[-1] if shards else None, pairs, count)
        while feed.has_more():
            paths.append(folder / file_name(key, len(shards) if log else None))
            shards.append(_write_shard(paths[-1], feed, most))
            if log:
                log.add(key, shards[-1])
    hashes, tokens = zip(*((shard.sha256, shard.tokens) for shard in shards), strict=True)
    return Bin(tuple(paths), hashes, sum(tokens), feed.utf8_bytes, pairs.counts_VV)


def _write_shard(path: Path, feed: _Feed, most: int) -> Shard:
    digest, tokens = hashlib.sha256(), 0
    with replacing(path) as file:
        for ids in feed.take(most):
            file.write(ids.data)
            digest.update(ids.data)
            tokens += len(ids)
    return Shard(digest.hexdigest(), tokens, feed.characters, feed.utf8_bytes, feed.handed)


def _from_place(
    pieces: Iterable[Piece], characters: int, count: Callable[[int], None]
) -> Iterator[Piece]:
    """What comes after so many characters, which are read all the same."""
    for piece in pieces:
        before, after = cut(piece, characters)
        characters -= len(before.text)
        if before.text:
            count(len(before.text))
        if after.text:
            yield after


class _Feed:
    """The ids of encoded pieces, one behind the other, handed out in stretches.

    `characters` and `utf8_bytes` are those before the piece under way, of which the first `handed`
    ids have been handed out.
    """

    def __init__(
        self,
        encoding: Iterator[_Encoded],
        after: Shard | None,
        pairs: _Pairs,
        count: Callable[[int], None],
    ) -> None:
        self.characters = after.characters if after else 0
        self.utf8_bytes = after.utf8_bytes if after else 0
        self.handed = after.handed if after else 0
        self._encoding, self._pairs, self._count = encoding, pairs, count
        self._piece: _Encoded | None = None

    def has_more(self) -> bool:
        """Whether there is an id left."""
        while self._piece is None or self.handed == len(self._piece.ids):
            if self._piece is not None:
                self.characters += self._piece.characters
                self.utf8_bytes += self._piece.utf8_bytes
                self.handed = 0
            self._piece = next(self._encoding, None)
            if self._piece is None:
                return False
            if self.handed > len(self._piece.ids):
                raise _damaged_log()
            self._pairs.add(self._piece.ids, self._piece.pair_counts)
            self._count(self._piece.characters)
        return True

    def take(self, most: int) -> Iterator[Ids]:
        """At most so many of the next ids, in stretches."""
        while most > 0 and self.has_more():
            assert self._piece is not None
            ids = self._piece.ids[self.handed : self.handed + most]
            self.handed += len(ids)
            most -= len(ids)
            yield ids


def _encode(
    encode_piece: PieceEncoder, tokenizer: Tokenizer, has_documents: bool, piece: Piece
) -> _Encoded:
    text, vocab_size = piece.text, tokenizer.vocab_size
    if has_documents and isinstance(tokenizer, BpeTokenizer):
        ids = encode_documents(encode_piece, tokenizer, piece)
    else:
        ids = encode_piece(text)
    return _Encoded(
        ids.astype(id_dtype(vocab_size), copy=False),
        len(text),
        len(text) if text.isascii() else len(text.encode()),
        _pair_counts(ids, vocab_size),
    )


def _damaged_log() -> DamagedLogError:
    return DamagedLogError(
        "what is kept of this preparation is damaged, and is removed now", "prepare the same again"
    )


class _Pairs:
    """How often each id (row) is followed by each (column); None for large vocabularies."""

    def __init__(self, vocab_size: int) -> None:
        shape = (vocab_size, vocab_size)
        self.counts_VV = np.zeros(shape, np.int64) if vocab_size <= _MOST_BIGRAM_IDS else None
        self._before: Ids | None = None

    def add(self, ids: Ids, counts_VV: NDArray[np.int64] | None) -> None:
        """Adds the pairs in the next ids, and the one across their beginning."""
        if self.counts_VV is None or counts_VV is None:
            return
        self.counts_VV += counts_VV
        if self._before is not None:
            self.counts_VV[self._before[-1], ids[0]] += 1
        self._before = ids

    def add_written(self, folder: Path, key: str, shards: Sequence[Shard]) -> None:
        """Counts what was written, but for the piece under way, which will be added as a whole."""
        if self.counts_VV is None:
            return
        vocab_size = len(self.counts_VV)
        left = sum(shard.tokens for shard in shards) - shards[-1].handed
        for i in range(len(shards)):
            ids = np.memmap(folder / file_name(key, i), id_dtype(vocab_size), mode="r")[:left]
            left -= len(ids)
            for first in range(0, len(ids), _BLOCK):
                block = np.array(ids[first : first + _BLOCK])
                if block.max() >= vocab_size:
                    raise _damaged_log()
                self.add(block, _pair_counts(block, vocab_size))


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
