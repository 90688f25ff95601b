"""Documents to ids: each is encoded by itself, and ended by the end-of-text id."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.text.documents import Piece
from attnlm.tokens.tokenizer import END_OF_TEXT, BpeTokenizer, safe_cut
from attnlm.tokens.word_table import PieceEncoder


def safe_documents(pieces: Iterable[Piece], limit: int) -> Iterator[Piece]:
    """The same text in pieces of at most `limit` characters, however it comes in.

    Each is as long as it can be and ends where no token reaches across, or with a document; where
    a stretch of `limit` characters has no such place, it ends there all the same. The end of a
    document counts as many characters as "<|endoftext|>" has.
    """
    text, ends = "", list[int]()
    for piece in pieces:
        ends += [len(text) + end for end in piece.ends]
        text += piece.text
        start = first = 0
        while len(text) - start + len(END_OF_TEXT) * (len(ends) - first) > limit:
            end, last = _next_cut(text, ends, start, first, limit)
            yield Piece(text[start:end], tuple(place - start for place in ends[first:last]))
            start, first = end, last
        text, ends = text[start:], [end - start for end in ends[first:]]
    if text:
        yield Piece(text, tuple(ends))


def _next_cut(text: str, ends: list[int], start: int, first: int, limit: int) -> tuple[int, int]:
    """Where the piece from `start` on ends, and how many of `ends` come before that."""
    last, room = first, limit
    while last < len(ends) and ends[last] - start + len(END_OF_TEXT) <= room:
        last, room = last + 1, room - len(END_OF_TEXT)
    if last < len(ends):  # an end comes with the character before it
        room = min(room, ends[last] - 1 - start)
    cuts = [start + cut] if (cut := safe_cut(text[start : start + room + 1])) else []
    return max([*cuts, *ends[first:last][-1:]], default=start + room), last


def encode_documents(
    encode_piece: PieceEncoder, tokenizer: BpeTokenizer, piece: Piece
) -> NDArray[np.unsignedinteger[Any]]:
    """The ids of a piece; "<|endoftext|>" and the like in its text are text like any other."""
    places = itertools.pairwise((0, *piece.ends, len(piece.text)))
    texts = [piece.text[begin:end] for begin, end in places]
    if not tokenizer.has_special(piece.text):
        # The fast way: the tokenizer knows the ends by their text, where there is no other such.
        return encode_piece(tokenizer.end_text.join(texts))
    end = np.array([tokenizer.end_of_text], np.uint32)
    between = itertools.repeat(end, len(texts) - 1)
    ids = itertools.zip_longest(map(tokenizer.encode_ordinary, texts), between)
    return np.concatenate([part for pair in ids for part in pair if part is not None])
