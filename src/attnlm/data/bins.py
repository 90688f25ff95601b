"""The encoding of splits to files of ids, and the counts of pairs of adjacent ids."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress
from attnlm.base.files import replacing
from attnlm.compute.threads import cores, map_ahead
from attnlm.data.dataset import Ids, id_dtype, sampled_hash
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


def write_bins(
    folder: Path, split: Split, tokenizer: Tokenizer, on_event: OnEvent
) -> dict[str, Any]:
    """Encode both splits to train.bin and val.bin in `folder`. Return what meta.json records of
    them. Raises AttnlmError if a split has less than two tokens.
    """
    encode_piece, is_bpe = piece_encoder(tokenizer), isinstance(tokenizer, BpeTokenizer)
    # Characters take one worker: this thread, which reads, hashes and writes, has as much to do.
    workers = min(cores(), _MOST_WORKERS) if is_bpe else 1
    meta: dict[str, Any] = {}
    pair_counts: dict[str, NDArray[np.int64] | None] = {}
    done = 0
    for key, found in itertools.groupby(split.pieces(), itemgetter(0)):
        text, path, pieces = split.text_of(key), folder / f"{key}.bin", map(itemgetter(1), found)
        encode = functools.partial(_encode, encode_piece, tokenizer, text.corpus.has_documents)
        ahead = map_ahead(encode, safe_pieces(pieces, PIECE) if is_bpe else pieces, workers)
        digest, tokens, utf8_bytes, last = hashlib.sha256(), 0, 0, 0
        pairs_VV: NDArray[np.int64] | None = None
        try:
            with replacing(path) as file, contextlib.closing(ahead) as encoded:
                for ids, characters, size, counts_VV in encoded:
                    file.write(ids.data)
                    digest.update(ids.data)
                    if pairs_VV is None:
                        pairs_VV = counts_VV
                    elif counts_VV is not None:
                        pairs_VV += counts_VV
                        pairs_VV[last, ids[0]] += 1
                    tokens, utf8_bytes, last = tokens + len(ids), utf8_bytes + size, ids[-1]
                    done += characters
                    on_event(Progress("encode", done, split.characters, "chars"))
        except UnknownCharactersError:  # the vocabulary was made from the whole text
            raise text.changed() from None
        meta |= {f"{key}_tokens": tokens, f"{key}_sha256": digest.hexdigest()}
        meta[f"{key}_sampled_sha256"], pair_counts[key] = sampled_hash(path), pairs_VV
    for key, title in (("train", "training"), ("val", "validation")):
        if meta.get(f"{key}_tokens", 0) < 2:
            raise AttnlmError(
                f"the {title} split of {split.text_of(key).corpus.shown} has fewer than two tokens",
                "use a longer text" + ("" if split.val_text else ", or another `val_fraction`"),
            )
    meta["val_bytes"] = utf8_bytes  # of the last split
    return {**meta, "bigram_loss": _bigram_loss(pair_counts["train"], pair_counts["val"])}


def _encode(
    encode_piece: PieceEncoder, tokenizer: Tokenizer, has_documents: bool, piece: Piece
) -> tuple[Ids, int, int, NDArray[np.int64] | None]:
    """Return the ids of a piece, its numbers of characters and UTF-8 bytes, and its pair counts.

    The counts, of shape (V, V), say how often each id (row) is followed by each id (column). They
    are None for large vocabularies.
    """
    text, vocab_size = piece.text, tokenizer.vocab_size
    if has_documents and isinstance(tokenizer, BpeTokenizer):
        ids = encode_documents(encode_piece, tokenizer, piece)
    else:
        ids = encode_piece(text)
    counts_VV: NDArray[np.int64] | None = None
    if vocab_size <= _MOST_BIGRAM_IDS:
        dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
        pairs = np.multiply(ids[:-1], vocab_size, dtype=dtype)
        pairs += ids[1:]
        counts_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    stored = ids.astype(id_dtype(vocab_size), copy=False)
    utf8_bytes = len(text) if text.isascii() else len(text.encode())
    return stored, len(text), utf8_bytes, counts_VV


def _bigram_loss(
    train_VV: NDArray[np.int64] | None, val_VV: NDArray[np.int64] | None
) -> float | None:
    """Return the loss of the validation split, in nats per token, with the bigram probabilities of
    the training split, given the pair counts of both.

    1 is added to each count of the training split. Return None if there are no counts.
    """
    if train_VV is None or val_VV is None:
        return None
    smoothed_VV = train_VV + 1
    log_p_VV = np.log(smoothed_VV / smoothed_VV.sum(axis=1, keepdims=True))
    return 0.0 - float((val_VV * log_p_VV).sum() / val_VV.sum())  # never −0


def encode_documents(
    encode_piece: PieceEncoder, tokenizer: BpeTokenizer, piece: Piece
) -> NDArray[np.unsignedinteger[Any]]:
    """Return the ids of a piece, with the end-of-text id at the ends of its documents.

    A special text in the piece itself, such as "<|endoftext|>", is encoded as ordinary text.
    """
    places = itertools.pairwise((0, *piece.ends, len(piece.text)))
    texts = [piece.text[begin:end] for begin, end in places]
    if not tokenizer.has_special(piece.text):
        # The fast way: every special text in the joined text is the end of a document.
        return encode_piece(tokenizer.end_text.join(texts))
    end = np.array([tokenizer.end_of_text], np.uint32)
    ended = [part for text in texts for part in (tokenizer.encode_ordinary(text), end)]
    return np.concatenate(ended[:-1])
