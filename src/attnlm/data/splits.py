"""The properties of a text, found in a first reading, and its training and validation splits."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator
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
from attnlm.tokens.tokenizer import code_points, encoded

# UTF-8 bytes. The trainer of byte pairs needs up to 100 times this memory if no word is repeated.
_SAMPLE_BYTES = 2**22
_SAMPLE_BLOCK = 2**14  # characters
_END = b"\xff"  # marks a document's end in hashed bytes; never in UTF-8


@dataclass(frozen=True)
class Text:
    """A corpus, and its size, hash and characters, found in a first reading.

    `sha256` covers the text in UTF-8 and the ends of its documents. `distinct` has the distinct
    characters of the text, sorted. `documents` counts the documents whose ends the corpus marks.
    """

    corpus: Corpus
    characters: int
    utf8_bytes: int
    sha256: str
    distinct: str
    documents: int

    def pieces(self) -> Iterator[Piece]:
        """Read the text again and yield it. Raises AttnlmError at the end if it has changed."""
        digest = hashlib.sha256()
        for piece in self.corpus.pieces():
            digest.update(_marked(piece, encoded(piece.text, "utf-8")))
            yield piece
        if digest.hexdigest() != self.sha256:
            raise self.changed()

    def changed(self) -> AttnlmError:
        """Return the error for a text that has changed since it was read."""
        return AttnlmError(
            f"{self.corpus.shown} changed while it was read",
            "try again when no other program writes to it",
        )


@dataclass(frozen=True)
class Split:
    """A training and a validation split: two texts, or the start and the end of one text."""

    text: Text
    val_fraction: float | None
    val_text: Text | None

    @property
    def train_characters(self) -> int:
        # The digits as written count: the double 0.9 exceeds 9/10, which would cost a character.
        fraction = Fraction(str(self.val_fraction or 0))
        return math.floor(self.text.characters * (1 - fraction))

    @property
    def characters(self) -> int:
        return sum(text.characters for text in self.texts)

    @property
    def texts(self) -> list[Text]:
        return [self.text, *([self.val_text] if self.val_text else [])]

    def text_of(self, key: str) -> Text:
        """Return the text that contains the split `key`, "train" or "val"."""
        return self.val_text if key == "val" and self.val_text else self.text

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of both splits, each with its split's name, "train" or "val"."""
        left = self.train_characters
        for piece in self.text.pieces():
            before, after = piece.cut(left)
            if before.text:
                yield "train", before
            if after.text:
                yield "val", after
            left -= len(before.text)
        if self.val_text:
            for piece in self.val_text.pieces():
                yield "val", piece

    def train_sample(self) -> list[str]:
        """Return the training split, or blocks spread evenly over it if it is large."""
        share = min(Fraction(1), Fraction(_SAMPLE_BYTES, self.text.utf8_bytes))
        stride = math.ceil(_SAMPLE_BLOCK / share)
        blocks = []
        position = 0
        for _, piece in itertools.takewhile(lambda item: item[0] == "train", self.pieces()):
            for start in range(-(position % stride), len(piece.text), stride):
                blocks.append(piece.text[max(start, 0) : max(start + _SAMPLE_BLOCK, 0)])
            position += len(piece.text)
        return blocks


def read_text(corpus: Corpus, on_event: OnEvent) -> Text:
    """Read a corpus once to count and hash it. Raises AttnlmError if it is empty."""
    characters = utf8_bytes = documents = 0
    digest = hashlib.sha256()
    is_there = np.zeros(0x110000, np.bool_)

    def survey(piece: Piece) -> tuple[Piece, bytes, NDArray[np.unsignedinteger[Any]]]:
        """Return the piece, its UTF-8, and its code points that `is_there` lacks."""
        utf8 = encoded(piece.text, "utf-8")
        if piece.text.isascii():
            known = np.flatnonzero(is_there[:128]).astype(np.uint8).tobytes()
            return piece, utf8, np.frombuffer(utf8.translate(None, known), np.uint8)
        points = code_points(piece.text)
        return piece, utf8, points[~is_there.take(points)]

    with contextlib.closing(map_ahead(survey, corpus.pieces())) as surveys:
        for piece, utf8, newcomers in surveys:
            digest.update(_marked(piece, utf8))
            is_there[newcomers] = True
            characters += len(piece.text)
            utf8_bytes += len(utf8)
            documents += len(piece.ends)
            on_event(Progress("read", characters, None, "chars"))
    if characters == 0:
        raise AttnlmError(f"{corpus.shown} is empty", "use a text that is not empty")
    distinct = "".join(map(chr, np.flatnonzero(is_there)))
    if "\r" in distinct:
        on_event(
            Note(
                f"{corpus.shown} has carriage returns (Windows line ends, CR LF), which are kept; "
                "use `newlines` unix to convert them to LF"
            )
        )
    return Text(corpus, characters, utf8_bytes, digest.hexdigest(), distinct, documents)


def _marked(piece: Piece, utf8: bytes) -> bytes:
    """Return a piece in UTF-8, with the byte `_END` wherever a document ends."""
    if not piece.ends:
        return utf8
    places = itertools.pairwise((0, *piece.ends, len(piece.text)))
    return _END.join(piece.text[begin:end].encode() for begin, end in places)
