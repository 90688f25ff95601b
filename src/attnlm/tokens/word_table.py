"""Byte-pair encoding of a long text: a table holds the ids of words that have occurred.

A text is split between a visible ASCII character and the whitespace after it, if no token can cross
such a place in any text. A word is the text between two such places, including its leading
whitespace. native/word_table.c finds the words, and tiktoken encodes new words.
"""

from __future__ import annotations

import ctypes
import secrets
import string
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.compute.native import baseline_library
from attnlm.compute.native.structs import CWords
from attnlm.tokens.specs import takes_line_ends
from attnlm.tokens.tokenizer import PIECE, BpeTokenizer, Tokenizer, encode_unicode

# Limits of each thread's table, about 30 MB: most texts of 100 MB have fewer different words.
_MOST_WORDS = 2**18
_MOST_BYTES = 2**22
_SLOTS = 2**20
_BEFORE_SPACE = 1
_BEFORE_ANY_WHITESPACE = 2

Ids = NDArray[np.unsignedinteger[Any]]
PieceEncoder = Callable[[str], Ids]


def piece_encoder(tokenizer: Tokenizer) -> PieceEncoder:
    """Return `tokenizer.encode_piece`, or a faster function with the same result.

    Several threads may call the returned function.
    """
    if not isinstance(tokenizer, BpeTokenizer) or (native := baseline_library()) is None:
        return tokenizer.encode_piece
    idle: SimpleQueue[WordTable] = SimpleQueue()

    def encode_piece(text: str) -> Ids:
        try:
            table = idle.get_nowait()
        except Empty:
            table = WordTable(tokenizer, native)
        ids = table.encode_piece(text)
        idle.put(table)
        return ids

    return encode_piece


class WordTable:
    """A table of the words seen so far and their ids. The table is cleared when it is full."""

    def __init__(
        self,
        tokenizer: BpeTokenizer,
        native: ctypes.CDLL,
        *,
        most_words: int = _MOST_WORDS,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._find, self._copy = native.find_words, native.copy_ids
        self._length_of = np.fromiter(map(len, tokenizer.tokens), np.int64)
        self._words = np.zeros(1, np.int64)
        self._word_at = np.zeros(most_words + 1, np.int64)
        self._ids_at = np.zeros(most_words + 1, np.int64)
        self._slot = np.zeros(_SLOTS, np.int32)
        self._hashes = np.empty(most_words, np.uint64)
        # Which whitespace after a byte ends a word. No word ends after a character beyond ASCII.
        self._ends = np.zeros(256, np.uint8)
        self._ends[ord("!") : ord("~") + 1] = _BEFORE_ANY_WHITESPACE
        if takes_line_ends(tokenizer.pattern):  # tokens can hold punctuation and a line end
            self._ends[list(map(ord, string.punctuation))] = _BEFORE_SPACE
        self._bytes = np.empty(most_bytes, np.uint8)
        self._ids = np.empty(most_bytes, np.uint32)  # a token has a byte or more
        # A word has 2 bytes or more; ends of documents make a piece longer than `PIECE`.
        self._numbers = np.empty(9 * PIECE, np.int32)
        self._span = np.zeros(2, np.int64)
        self._out = (self._numbers.ctypes.data, self._span.ctypes.data)
        pointed = ("words", "word_at", "ids_at", "slot", "hashes", "ends", "bytes", "ids")
        self._struct = CWords(
            most_words=most_words,
            most_bytes=most_bytes,
            slots=_SLOTS,
            keys=(secrets.randbits(64), secrets.randbits(64) | 1),
            **{name: getattr(self, f"_{name}") for name in pointed},
        )
        self._address = ctypes.addressof(self._struct)

    def encode_piece(self, text: str) -> Ids:
        """Return the same ids as the tokenizer for a text of at most `PIECE` characters."""
        text = self._tokenizer.normalised(text)
        plain = self._tokenizer.encode_piece
        utf8 = encode_unicode(text, "utf-8")
        if len(utf8) > 2 * self._numbers.size:  # C does not check this bound
            return plain(text)
        for _ in range(2):
            old_words = self._words[0]
            words = self._find(self._address, utf8, len(utf8), *self._out)
            if words >= 0 and self._store_new_words(old_words):
                break
            self._words[0] = 0  # it is full: forget all words
            self._slot[:] = 0
        else:
            return plain(text)
        begin, end = self._span
        ids = np.empty(end - begin, np.uint32)
        tokens = self._copy(self._address, words, self._out[0], ids.ctypes.data)
        start = utf8[:begin].decode()
        rest = utf8[end:].decode()
        return np.concatenate((plain(start), ids[:tokens], plain(rest)))

    def _store_new_words(self, old_words: int) -> bool:
        """Store ids of all words but the first `old_words`. Return False if a token spans two."""
        starts = self._word_at[old_words : self._words[0] + 1]
        text = self._bytes[starts[0] : starts[-1]].tobytes().decode()
        ids = self._tokenizer.encode_piece(text)
        tokens_at = np.concatenate(([0], np.cumsum(self._length_of[ids])))
        places = np.searchsorted(tokens_at, starts - starts[0])
        first = self._ids_at[old_words]
        self._ids_at[old_words : self._words[0] + 1] = first + places
        self._ids[first : first + len(ids)] = ids
        return np.array_equal(tokens_at[places], starts - starts[0])
