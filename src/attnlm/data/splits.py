"""The properties of a text, found in a first reading, and its training and validation splits."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.compute.threads import map_ahead
from attnlm.text.corpus import Corpus
from attnlm.text.text_files import Piece
from attnlm.tokens.tokenizer import code_points, encode_unicode

# UTF-8 bytes. The trainer of byte pairs needs up to 100 times this memory if no word is repeated.
SAMPLE_BYTES = 2**22
_SAMPLE_BLOCK = 2**14  # characters
_END = b"\xff"  # marks a document's end in hashed bytes; never in UTF-8
_ENOUGH = 10  # documents of each split, for which documents are split by default
SPLITS = ("train", "val")


def chosen_documents(fraction: Fraction) -> Iterator[int]:
    """Yield the indices of the documents for validation, without end.

    Of 1/`fraction` documents in a row, one is chosen. The choice of a document depends only on its
    index and the fraction.
    """
    for row in itertools.count():
        first = math.ceil(row / fraction)
        end = math.ceil((row + 1) / fraction)
        digest = hashlib.blake2b(f"1 {row}".encode(), digest_size=8).digest()
        yield first + int.from_bytes(digest) % (end - first)


class Divider:
    """Divides a text, piece by piece, into the documents of the two splits."""

    def __init__(self, fraction: Fraction) -> None:
        self._chosen = chosen_documents(fraction)
        self._next = next(self._chosen)  # the next document that is chosen
        self._document = 0  # the document in which the next piece begins

    def divide(self, piece: Piece) -> list[tuple[str, Piece]]:
        """Return the parts of the next piece, in order, each with its split, "train" or "val"."""
        parts: list[tuple[str, Piece]] = []
        begin = passed = 0  # the characters and the ends of `piece` that are in `parts`
        while begin < len(piece.text):
            is_chosen = self._document == self._next
            count = 1 if is_chosen else self._next - self._document
            ends = piece.ends[passed : passed + count]
            is_complete = len(ends) == count
            end = ends[-1] if is_complete else len(piece.text)
            inside = tuple(place - begin for place in ends)
            parts.append((SPLITS[is_chosen], Piece(piece.text[begin:end], inside)))
            begin = end
            passed = passed + len(ends)
            self._document += len(ends)
            if is_chosen and is_complete:
                self._next = next(self._chosen)
        return parts


@dataclass(frozen=True)
class SurveyedText:
    """A corpus, and its size, hash and characters, found in a first reading.

    `fraction` is the share of the text that is for validation, if it is to be split.
    `sha256` covers the text in UTF-8 and the ends of its documents, if the corpus marks them.
    `alphabet` has the distinct characters of the text, sorted. `chosen` is the number of characters
    of the documents that are chosen for validation, if the text is split by documents. `digests`
    has a number for each document, equal for equal documents.
    """

    corpus: Corpus
    fraction: Fraction
    characters: int
    utf8_bytes: int
    sha256: str
    alphabet: str
    digests: NDArray[np.int64]
    chosen: int

    @property
    def documents(self) -> int:
        return len(self.digests)

    @property
    def has_many_documents(self) -> bool:
        """Return True if documents are split by default: each split then has at least 10."""
        return self.documents * min(self.fraction, 1 - self.fraction) >= _ENOUGH

    def pieces(self) -> Iterator[Piece]:
        """Read the text again and yield it. Raises AttnlmError at the end if it has changed."""
        digest = hashlib.sha256()
        for piece in self.corpus.pieces():
            digest.update(
                _with_end_marks(piece, encode_unicode(piece.text, "utf-8"), self.corpus.marks_ends)
            )
            yield piece
        if digest.hexdigest() != self.sha256:
            raise self.changed_error()

    def changed_error(self) -> AttnlmError:
        """Return the error for a text that has changed since it was read."""
        return AttnlmError(
            f"{self.corpus.shown} changed while it was read",
            "try again when no other program writes to it",
        )


@dataclass(frozen=True)
class Split:
    """A training and a validation split: two texts, or two parts of one text.

    The validation split of one text is its end or, if `by_documents`, its chosen documents.
    """

    text: SurveyedText
    val_text: SurveyedText | None = None
    by_documents: bool = False

    @property
    def train_characters(self) -> int:
        if self.val_text:
            return self.text.characters
        if self.by_documents:
            return self.text.characters - self.text.chosen
        return math.floor(self.text.characters * (1 - self.text.fraction))

    @property
    def characters(self) -> int:
        return sum(text.characters for text in self.texts)

    @property
    def texts(self) -> list[SurveyedText]:
        return [self.text, *([self.val_text] if self.val_text else [])]

    def text_of(self, key: str) -> SurveyedText:
        """Return the text that contains the split `key`, "train" or "val"."""
        return self.val_text if key == "val" and self.val_text else self.text

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of both splits, each with its split's name, "train" or "val".

        Only the pieces of a corpus that marks the ends of documents have these ends.
        """
        for key, piece in self._all_pieces():
            if piece.text:
                yield key, piece if self.text_of(key).corpus.marks_ends else Piece(piece.text)

    def _all_pieces(self) -> Iterator[tuple[str, Piece]]:
        if self.by_documents:
            divider = Divider(self.text.fraction)
            for piece in self.text.pieces():
                parts = divider.divide(piece)
                for key in SPLITS:
                    yield key, join_pieces([part for split, part in parts if split == key])
            return
        remaining = self.train_characters
        for piece in self.text.pieces():
            before, after = piece.cut(remaining)
            yield "train", before
            yield "val", after
            remaining -= len(before.text)
        if self.val_text:
            for piece in self.val_text.pieces():
                yield "val", piece

    def train_sample(self) -> list[str]:
        """Return the training split, or blocks spread evenly over it if it is large."""
        share = min(Fraction(1), Fraction(SAMPLE_BYTES, self.text.utf8_bytes))
        stride = math.ceil(_SAMPLE_BLOCK / share)
        blocks = []
        position = 0
        characters = self.train_characters
        for piece in (piece for key, piece in self.pieces() if key == "train"):
            for start in range(-(position % stride), len(piece.text), stride):
                blocks.append(piece.text[max(start, 0) : max(start + _SAMPLE_BLOCK, 0)])
            position += len(piece.text)
            if position == characters:
                break
        return blocks


def survey_text(corpus: Corpus, fraction: Fraction, on_event: OnEvent) -> SurveyedText:
    """Read a corpus once to count and hash it. Raises AttnlmError if it is empty."""
    characters = utf8_bytes = chosen = opened = 0
    digests = array("q")
    digest = hashlib.sha256()
    divider = Divider(fraction)
    has_occurred = np.zeros(0x110000, np.bool_)

    def survey_piece(piece: Piece) -> tuple[Piece, bytes, NDArray[np.unsignedinteger[Any]]]:
        """Return the piece, its text in UTF-8, and its code points that `has_occurred` lacks."""
        text = piece.text
        utf8 = encode_unicode(text, "utf-8")
        if text.isascii():
            known_bytes = np.flatnonzero(has_occurred[:128]).astype(np.uint8).tobytes()
            return piece, utf8, np.frombuffer(utf8.translate(None, known_bytes), np.uint8)
        points = code_points(text)
        return piece, utf8, points[~has_occurred.take(points)]

    with contextlib.closing(map_ahead(survey_piece, corpus.pieces())) as surveyed_pieces:
        for piece, utf8, new_points in surveyed_pieces:
            digest.update(_with_end_marks(piece, utf8, corpus.marks_ends))
            has_occurred[new_points] = True
            characters += len(piece.text)
            chosen += sum(len(part.text) for key, part in divider.divide(piece) if key == "val")
            utf8_bytes += len(utf8)
            if corpus.has_documents:
                for begin, end in itertools.pairwise((0, *piece.ends)):
                    digests.append(hash((opened, piece.text[begin:end])))
                    opened = 0
                rest = piece.text[piece.ends[-1] if piece.ends else 0 :]
                opened = hash((opened, rest)) if rest else opened
            on_event(Progress("read", characters, None, "chars"))
    if characters == 0:
        raise AttnlmError(f"{corpus.shown} is empty", "use a text that is not empty")
    alphabet = "".join(map(chr, np.flatnonzero(has_occurred)))
    if "\r" in alphabet:
        on_event(
            Note(
                f"{corpus.shown} has carriage returns (Windows line ends, CR LF), which are kept; "
                "dos2unix converts CR LF to LF"
            )
        )
    if "\0" in alphabet:
        on_event(Note(f"{corpus.shown} has NUL characters: if it is UTF-16, name its `encoding`"))
    return SurveyedText(
        corpus,
        fraction,
        characters,
        utf8_bytes,
        digest.hexdigest(),
        alphabet,
        np.array(digests),
        chosen,
    )


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Return the texts of `pieces` in one piece."""
    starts = itertools.accumulate((len(piece.text) for piece in pieces), initial=0)
    ends = [start + end for start, piece in zip(starts, pieces, strict=False) for end in piece.ends]
    return Piece("".join(piece.text for piece in pieces), tuple(ends))


def _with_end_marks(piece: Piece, utf8: bytes, marks_ends: bool) -> bytes:
    """Return a piece in UTF-8; if `marks_ends`, with the byte `_END` wherever a document ends."""
    if not piece.ends or not marks_ends:
        return utf8
    places = itertools.pairwise((0, *piece.ends, len(piece.text)))
    return _END.join(piece.text[begin:end].encode() for begin, end in places)
