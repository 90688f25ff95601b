"""Encoding of a split's text to a file of ids, with counts of its pairs of ids."""

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
from attnlm.compute.threads import cores, map_ahead
from attnlm.data.dataset import Ids, id_dtype
from attnlm.data.splits import Split
from attnlm.text.text_files import Piece
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
_PIECE = PIECE  # characters that a worker encodes in one call


@dataclass(frozen=True)
class Bin:
    """A split that was written to a file; `utf8_bytes` is the length of its text.

    `pair_counts`, shape (V, V), counts how often each id (row) is followed by each id (column), or
    None for large vocabularies.
    """

    path: Path
    sha256: str
    tokens: int
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None


def write_bins(
    folder: Path, split: Split, tokenizer: Tokenizer, on_event: OnEvent
) -> dict[str, Bin]:
    """Encode both splits to train.bin and val.bin in `folder`.

    Raises AttnlmError if a split has less than two tokens.
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
        path = folder / f"{key}.bin"
        try:
            bins[key] = _write_bin(path, map(itemgetter(1), pieces), tokenizer, encode, count)
        except UnknownCharactersError:  # the vocabulary was made from the whole text
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
    """The ids of a piece of text in their stored type, and the counts of the piece."""

    ids: Ids
    characters: int
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None  # shape (V, V)


def _write_bin(
    path: Path,
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    encode: Callable[[Piece], _Encoded],
    count: Callable[[int], None],
) -> Bin:
    workers = 1  # this thread, which reads, hashes and writes, has as much to do
    if isinstance(tokenizer, BpeTokenizer):
        pieces = safe_pieces(pieces, _PIECE)
        workers = min(cores(), _MOST_WORKERS)
    digest, tokens, utf8_bytes = hashlib.sha256(), 0, 0
    pairs_VV: NDArray[np.int64] | None = None
    last = 0
    with replacing(path) as file, contextlib.closing(map_ahead(encode, pieces, workers)) as found:
        for piece in found:
            file.write(piece.ids.data)
            digest.update(piece.ids.data)
            tokens += len(piece.ids)
            utf8_bytes += piece.utf8_bytes
            if pairs_VV is None:
                pairs_VV = piece.pair_counts
            elif piece.pair_counts is not None:
                pairs_VV += piece.pair_counts
                pairs_VV[last, piece.ids[0]] += 1
            last = piece.ids[-1]
            count(piece.characters)
    return Bin(path, digest.hexdigest(), tokens, utf8_bytes, pairs_VV)


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


# --- Documents ------------------------------------------------------------------------------------


def encode_documents(
    encode_piece: PieceEncoder, tokenizer: BpeTokenizer, piece: Piece
) -> NDArray[np.unsignedinteger[Any]]:
    """Return the ids of a piece; special texts in it, as "<|endoftext|>", are ordinary text."""
    places = itertools.pairwise((0, *piece.ends, len(piece.text)))
    texts = [piece.text[begin:end] for begin, end in places]
    if not tokenizer.has_special(piece.text):
        # The fast way: every special text in the joined text is the end of a document.
        return encode_piece(tokenizer.end_text.join(texts))
    end = np.array([tokenizer.end_of_text], np.uint32)
    between = itertools.repeat(end, len(texts) - 1)
    ids = itertools.zip_longest(map(tokenizer.encode_ordinary, texts), between)
    return np.concatenate([part for pair in ids for part in pair if part is not None])


# --- Pairs of ids ---------------------------------------------------------------------------------


def _pair_counts(
    ids: NDArray[np.unsignedinteger[Any]], vocab_size: int
) -> NDArray[np.int64] | None:
    """Return counts of ids (columns) after ids (rows), (V, V), or None for large vocabularies."""
    if vocab_size > _MOST_BIGRAM_IDS:
        return None
    dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
    pairs = np.multiply(ids[:-1], vocab_size, dtype=dtype)
    pairs += ids[1:]
    return np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)


def bigram_loss(train: Bin, val: Bin) -> float | None:
    """Return nats per validation token of training counts plus 1; None for large vocabularies."""
    if train.pair_counts is None or val.pair_counts is None:
        return None
    counts_VV = train.pair_counts + 1
    log_p_VV = np.log(counts_VV / counts_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val.pair_counts * log_p_VV).sum() / val.pair_counts.sum())  # never −0
