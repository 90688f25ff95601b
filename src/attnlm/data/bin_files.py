"""The encoding of splits to files of ids, and the counts of pairs of adjacent ids."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress
from attnlm.base.files import open_replacement
from attnlm.compute.threads import cores, map_ahead
from attnlm.data.dataset import Ids, SplitFacts, id_dtype, sampled_hash
from attnlm.data.splits import SPLITS, Split
from attnlm.text.text_files import Piece
from attnlm.tokens.tokenizer import (
    PIECE,
    BpeTokenizer,
    Tokenizer,
    UnknownCharactersError,
    safe_pieces_of_texts,
)

MOST_BIGRAM_IDS = 1024
_MOST_WORKERS = 8


class WrittenBins(NamedTuple):
    """The properties of both splits that are known when their files are written."""

    train: SplitFacts
    val: SplitFacts
    val_bytes: int
    bigram_loss: float | None


def write_bins(folder: Path, split: Split, tokenizer: Tokenizer, on_event: OnEvent) -> WrittenBins:
    """Encode both splits to train.bin and val.bin in `folder`.

    Raises AttnlmError if a split has less than two tokens.
    """
    is_bpe = isinstance(tokenizer, BpeTokenizer)
    # Characters take one worker: this thread, which reads, hashes and writes, has as much to do.
    workers = min(cores(), _MOST_WORKERS) if is_bpe else 1
    pieces = split.pieces()
    encode = functools.partial(_encode_piece, tokenizer, split)
    characters = 0
    if is_bpe or tokenizer.special:
        pieces = safe_pieces_of_texts(pieces, PIECE)
    ahead = map_ahead(encode, pieces, workers)
    paths = {key: folder / f"{key}.bin" for key in SPLITS}
    with contextlib.ExitStack() as opening:
        bins = {
            key: _BinWriter(opening.enter_context(open_replacement(paths[key]))) for key in SPLITS
        }
        for encoded in opening.enter_context(contextlib.closing(ahead)):
            bins[encoded.key].add(encoded)
            characters += encoded.characters
            on_event(Progress("encode", characters, split.characters, "chars"))
    split_facts = {}
    for (key, bin_file), title in zip(bins.items(), ("training", "validation"), strict=True):
        if bin_file.tokens < 2:
            raise AttnlmError(
                f"the {title} split of {split.text_of(key).corpus.shown} has fewer than two tokens",
                "use a longer text" + ("" if split.val_text else ", or another `val_fraction`"),
            )
        sha256 = bin_file.digest.hexdigest()
        split_facts[key] = SplitFacts(bin_file.tokens, sha256, sampled_hash(paths[key]))
    return WrittenBins(
        split_facts["train"],
        split_facts["val"],
        bins["val"].utf8_bytes,
        bigram_loss(bins["train"].pairs_VV, bins["val"].pairs_VV),
    )


class _EncodedPiece(NamedTuple):
    """A piece of the split `key`, encoded.

    `pair_counts`, of shape (V, V), says how often each id (row) is followed by each id (column).
    Large vocabularies have None.
    """

    key: str
    characters: int
    ids: Ids
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None


def _encode_piece(tokenizer: Tokenizer, split: Split, item: tuple[str, Piece]) -> _EncodedPiece:
    """Return a piece of a split encoded. Raises AttnlmError if the text has changed."""
    key, piece = item
    vocab_size = tokenizer.vocab_size
    text = split.text_of(key)
    try:
        if text.corpus.marks_ends:
            ids = encode_documents(tokenizer, piece)
        else:
            ids = tokenizer.encode_piece(piece.text)
    except UnknownCharactersError:  # the vocabulary was made from the whole text
        raise text.changed_error() from None
    counts_VV: NDArray[np.int64] | None = None
    if vocab_size <= MOST_BIGRAM_IDS:
        dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
        pairs = np.multiply(ids[:-1], vocab_size, dtype=dtype)
        pairs += ids[1:]
        counts_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    stored = ids.astype(id_dtype(vocab_size), copy=False)
    utf8_bytes = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
    return _EncodedPiece(key, len(piece.text), stored, utf8_bytes, counts_VV)


class _BinWriter:
    """A file of ids that is being written, with the counts of pairs of adjacent ids."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.tokens = self.utf8_bytes = self._last = 0
        self.pairs_VV: NDArray[np.int64] | None = None

    def add(self, piece: _EncodedPiece) -> None:
        """Write the ids of the next piece."""
        ids = piece.ids
        counts_VV = piece.pair_counts
        self._file.write(ids.data)
        self.digest.update(ids.data)
        if self.pairs_VV is None:
            self.pairs_VV = counts_VV
        elif counts_VV is not None:
            self.pairs_VV += counts_VV
            self.pairs_VV[self._last, ids[0]] += 1
        self._last = ids[-1]
        self.tokens += len(ids)
        self.utf8_bytes += piece.utf8_bytes


def bigram_loss(
    train_VV: NDArray[np.int64] | None, val_VV: NDArray[np.int64] | None
) -> float | None:
    """Return the loss of the validation split, in nats per token, with the bigram probabilities of
    the training split, given the pair counts of both.

    1 is added to each count of the training split. Return None without counts.
    """
    if train_VV is None or val_VV is None:
        return None
    smoothed_VV = train_VV + 1
    log_p_VV = np.log(smoothed_VV / smoothed_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val_VV * log_p_VV).sum() / val_VV.sum())  # never −0


def encode_documents(tokenizer: Tokenizer, piece: Piece) -> NDArray[np.unsignedinteger[Any]]:
    """Return the ids of a piece, with the end-of-text id at the ends of its documents.

    A special text in the piece itself, such as "<|endoftext|>", is encoded as ordinary text.
    """
    places = itertools.pairwise((0, *piece.ends, len(piece.text)))
    texts = [piece.text[begin:end] for begin, end in places]
    if not tokenizer.has_special(piece.text):
        # The fast way: every special text in the joined text is the end of a document.
        return tokenizer.encode_piece(tokenizer.end_text.join(texts))
    end = np.array([tokenizer.end_of_text], np.uint32)
    ended = [part for text in texts for part in (tokenizer.encode_ordinary(text), end)]
    return np.concatenate(ended[:-1])
