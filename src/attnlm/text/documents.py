"""Texts as pieces, with the places where documents end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from attnlm.text.records import records
from attnlm.text.text_files import PIECE, decoded


class Piece(NamedTuple):
    """A stretch of text of 1 to 2¹⁸ characters, and where in it documents end.

    The places are in characters, ascending and above 0: a document ends behind its last character.
    """

    text: str
    ends: tuple[int, ...] = ()


def pieces_of(path: Path, encoding: str, newlines: str, shown: str) -> Iterator[Piece]:
    """Yield a file of text in pieces, without a byte order mark."""
    texts = decoded(path, encoding, newlines, shown)
    is_first = True
    for text in filter(None, texts):
        if is_first:
            text, is_first = text.removeprefix("\ufeff"), False
        # Decoders of some encodings hold characters back, then return more than one read gave.
        for i in range(0, len(text), PIECE):
            yield Piece(text[i : i + PIECE])


def pieces_of_records(
    path: Path, column: str, newlines: str, shown: str, *, marked: bool
) -> Iterator[Piece]:
    """Yield the texts of a file of records in pieces; records without text are left out.

    Each is a document, or, unless `marked`, text that ends with a newline.
    """
    texts: Iterator[str] = filter(None, records(path, column, shown))
    if newlines == "unix":
        texts = (text.replace("\r\n", "\n").replace("\r", "\n") for text in texts)
    if not marked:
        texts = (text if text.endswith("\n") else text + "\n" for text in texts)
    waiting: list[str] = []
    ends: list[int] = []
    length = 0
    for text in texts:
        for i in range(0, len(text), PIECE):
            part = text[i : i + PIECE]
            if length + len(part) > PIECE:
                yield Piece("".join(waiting), tuple(ends))
                waiting, ends, length = [], [], 0
            waiting.append(part)
            length += len(part)
        if marked:
            ends.append(length)
    if waiting:
        yield Piece("".join(waiting), tuple(ends))


def ended(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the same pieces, the last one with a document's end behind it."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None:
            yield last
        last = piece
    if last is not None:
        end = len(last.text)
        yield last if last.ends[-1:] == (end,) else Piece(last.text, (*last.ends, end))
