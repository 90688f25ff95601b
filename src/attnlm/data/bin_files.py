"""The encoding of splits to files of ids, and the counts of pairs of adjacent ids."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent, Progress
from attnlm.base.files import open_replacement
from attnlm.compute.threads import cores, map_ahead
from attnlm.data.dataset import Ids, id_dtype
from attnlm.data.splits import SPLITS, Split
from attnlm.text.text_files import BLOCK, END
from attnlm.tokens.tokenizer import BpeTokenizer, Tokenizer, UnknownCharactersError, safe_blocks

MOST_BIGRAM_IDS = 1024
_MOST_WORKERS = 8


def write_bins(
    folder: Path, split: Split, tokenizer: Tokenizer, on_event: OnEvent
) -> dict[str, BinWriter]:
    """Encode both splits to train.bin and val.bin in `folder`, and return what was counted.

    Raises AttnlmError if a split has less than two tokens, or if the text has changed.
    """
    is_bpe = isinstance(tokenizer, BpeTokenizer)
    # Characters take one worker: this thread, which reads, hashes and writes, has as much to do.
    workers = min(cores(), _MOST_WORKERS) if is_bpe else 1
    written = {}
    characters = 0
    for key, title in zip(SPLITS, ("training", "validation"), strict=True):
        text = split.text_of(key)
        blocks = split.blocks(key)
        if is_bpe or tokenizer.special:
            blocks = safe_blocks(blocks, BLOCK)
        encode = functools.partial(_encode_block, tokenizer, text.corpus.marks_ends)
        bin_file = BinWriter()
        with (
            open_replacement(folder / f"{key}.bin") as file,
            contextlib.closing(map_ahead(encode, blocks, workers)) as ahead,
        ):
            try:
                for encoded in ahead:
                    bin_file.add(encoded, file)
                    characters += encoded.characters
                    on_event(Progress("encode", characters, split.characters, "chars"))
            except UnknownCharactersError:  # the vocabulary was made from the whole text
                raise text.changed_error() from None
        if bin_file.tokens < 2:
            raise AttnlmError(
                f"the {title} split of {text.corpus.shown} has fewer than two tokens",
                "use a longer text" + ("" if split.val_text else ", or another `val_fraction`"),
            )
        written[key] = bin_file
    for text in split.texts:
        text.check_unchanged()
    return written


class _EncodedBlock(NamedTuple):
    """A block of a split, encoded."""

    characters: int
    ids: Ids
    utf8_bytes: int
    pair_counts: NDArray[np.int64] | None


def _encode_block(tokenizer: Tokenizer, marks_ends: bool, block: str) -> _EncodedBlock:
    vocab_size = tokenizer.vocab_size
    ids = encode_documents(tokenizer, block) if marks_ends else tokenizer.encode_piece(block)
    counts_VV: NDArray[np.int64] | None = None
    if vocab_size <= MOST_BIGRAM_IDS:
        dtype = np.min_scalar_type(vocab_size**2 - 1)  # narrow is fast
        pairs = np.multiply(ids[:-1], vocab_size, dtype=dtype)
        pairs += ids[1:]
        counts_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    stored = ids.astype(id_dtype(vocab_size), copy=False)
    text = block.replace(END, "") if marks_ends else block
    utf8_bytes = len(text) if text.isascii() else len(text.encode())
    return _EncodedBlock(len(text), stored, utf8_bytes, counts_VV)


class BinWriter:
    """The counts of a file of ids, when it is written.

    `pairs_VV` says how often each id (row) is followed by each id (column); None for a large
    vocabulary.
    """

    def __init__(self) -> None:
        self.tokens = self.utf8_bytes = self._last = 0
        self.pairs_VV: NDArray[np.int64] | None = None

    def add(self, block: _EncodedBlock, file: IO[bytes]) -> None:
        """Write the ids of the next block."""
        ids = block.ids
        counts_VV = block.pair_counts
        file.write(ids.data)
        if self.pairs_VV is None:
            self.pairs_VV = counts_VV
        elif counts_VV is not None:
            self.pairs_VV += counts_VV
            self.pairs_VV[self._last, ids[0]] += 1
        self._last = ids[-1]
        self.tokens += len(ids)
        self.utf8_bytes += block.utf8_bytes


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


def encode_documents(tokenizer: Tokenizer, block: str) -> NDArray[np.unsignedinteger[Any]]:
    """Return the ids of a block, with the end-of-text id at the ends of its documents.

    A special text in the block itself, such as "<|endoftext|>", is encoded as ordinary text.
    """
    texts = block.split(END)
    if not tokenizer.has_special(block):
        # The fast way: every special text in the joined text is the end of a document.
        return tokenizer.encode_piece(tokenizer.end_text.join(texts))
    end = np.array([tokenizer.end_of_text], np.uint32)
    ended = [part for text in texts for part in (tokenizer.encode_ordinary(text), end)]
    return np.concatenate(ended[:-1])
