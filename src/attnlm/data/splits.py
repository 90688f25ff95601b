"""A text that was read once, what was found in it, and its training and validation splits."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.files import file_hash
from attnlm.compute.threads import map_ahead
from attnlm.text.corpus import Corpus
from attnlm.text.spool import is_own_spool, write_spool
from attnlm.text.text_files import BLOCK, END, check_size, text_blocks
from attnlm.tokens.tokenizer import code_points

# UTF-8 bytes. The trainer of byte pairs needs up to 100 times this memory if no word is repeated.
SAMPLE_BYTES = 2**22
_SAMPLE_BLOCK = 2**14  # characters
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


@dataclass(frozen=True)
class Text:
    """The text of a corpus in one file, and its size, hash and characters.

    The file is `spool` or, if that is None, the corpus itself. `sha256` covers the text in UTF-8
    and the ends of its documents, if the corpus marks them. `alphabet` has the distinct characters
    of the text, sorted.
    """

    corpus: Corpus
    spool: Path | None
    characters: int
    utf8_bytes: int
    documents: int
    sha256: str
    alphabet: str

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks. END follows each document."""
        return _blocks(self.corpus, self.spool)

    def chosen_characters(self, fraction: Fraction) -> int:
        """Return the number of characters of the documents that are chosen for validation."""
        return sum(map(_count, _documents_of(self.blocks(), fraction, for_val=True)))

    def digests(self) -> NDArray[np.int64]:
        """Return a number for each document, which is equal for equal documents."""
        digests = bytearray()
        digest = hashlib.blake2b(digest_size=8)
        for block in self.blocks() if self.documents else ():
            *ended, rest = block.split(END)
            for document in ended:
                digest.update(document.encode())
                digests += digest.digest()
                digest = hashlib.blake2b(digest_size=8)
            digest.update(rest.encode())
        return np.frombuffer(digests, np.int64)

    def lines(self) -> Iterator[str]:
        """Yield the lines that are not blank. A line longer than a block is cut."""
        rest = ""
        for block in self.blocks():
            *lines, rest = (rest + block.replace(END, "\n")).split("\n")
            yield from filter(None, map(str.strip, lines))
            if len(rest) > BLOCK:
                yield rest
                rest = ""
        yield from filter(None, [rest.strip()])

    def check_unchanged(self) -> None:
        """Raise AttnlmError if the user's file has changed since it was read."""
        if self.spool is None and file_hash(self.corpus.files[0].path) != self.sha256:
            raise self.changed_error()

    def changed_error(self) -> AttnlmError:
        """Return the error for a text that has changed since it was read."""
        return AttnlmError(
            f"{self.corpus.shown} changed while it was read",
            "try again when no other program writes to it",
        )


def read_text(corpus: Corpus, spool: Path, on_event: OnEvent) -> Text:
    """Read a corpus once, into the new file `spool` unless it is like its spool; count and hash it.

    Raises AttnlmError as `write_spool` does, and if the text is empty or too long.
    """
    path = None if is_own_spool(corpus) else spool
    if path is not None:
        write_spool(corpus, path, on_event)
    characters = utf8_bytes = documents = 0
    digest = hashlib.sha256()
    has_occurred = np.zeros(0x110000, np.bool_)

    def survey(block: str) -> tuple[int, int, int, NDArray[np.unsignedinteger[Any]]]:
        """Return the numbers of characters, bytes and documents of a block, and new characters."""
        ends = block.count(END)
        text = block.replace(END, "") if ends else block
        utf8 = text.encode()
        digest.update(block.encode(errors="surrogateescape") if corpus.marks_ends else utf8)
        if len(utf8) == len(text):
            known_bytes = np.flatnonzero(has_occurred[:128]).astype(np.uint8).tobytes()
            new_points = np.frombuffer(utf8.translate(None, known_bytes), np.uint8)
            return len(text), len(utf8), ends, new_points
        points = code_points(text)
        return len(text), len(utf8), ends, points[~has_occurred.take(points)]

    with contextlib.closing(map_ahead(survey, _blocks(corpus, path))) as surveyed:
        for count, size, ends, new_points in surveyed:
            has_occurred[new_points] = True
            characters += count
            utf8_bytes += size
            check_size(utf8_bytes, corpus.max_bytes, spool.parent, corpus.shown)
            documents += ends
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
    return Text(corpus, path, characters, utf8_bytes, documents, digest.hexdigest(), alphabet)


def _blocks(corpus: Corpus, spool: Path | None) -> Iterator[str]:
    if spool is None:
        yield from corpus.texts(corpus.files[0])
        return
    with spool.open("rb") as file:
        yield from text_blocks(file, "utf-8", corpus.shown, "surrogateescape")


@dataclass(frozen=True)
class Split:
    """A training and a validation split: two texts, or two parts of one text.

    The validation split of one text has the share `fraction` of it: its end or, if `by_documents`,
    its chosen documents.
    """

    text: Text
    val_text: Text | None
    fraction: Fraction
    by_documents: bool

    @functools.cached_property
    def train_characters(self) -> int:
        if self.val_text:
            return self.text.characters
        if self.by_documents:
            return self.text.characters - self.text.chosen_characters(self.fraction)
        return math.floor(self.text.characters * (1 - self.fraction))

    @property
    def characters(self) -> int:
        return sum(text.characters for text in self.texts)

    @property
    def texts(self) -> list[Text]:
        return [self.text, *([self.val_text] if self.val_text else [])]

    def text_of(self, key: str) -> Text:
        """Return the text that contains the split `key`, "train" or "val"."""
        return self.val_text if key == "val" and self.val_text else self.text

    def blocks(self, key: str) -> Iterator[str]:
        """Yield the split `key` in blocks. END follows documents if an end-of-text id will."""
        text = self.text_of(key)
        blocks = text.blocks()
        if self.by_documents:
            blocks = _documents_of(blocks, self.fraction, for_val=key == "val")
        elif self.val_text is None:
            blocks = _part_of(blocks, self.train_characters, is_tail=key == "val")
        for block in blocks:
            if block:
                yield block if text.corpus.marks_ends else block.replace(END, "")

    def train_sample(self) -> list[str]:
        """Return the training split, or blocks spread evenly over it if it is large."""
        share = min(Fraction(1), Fraction(SAMPLE_BYTES, self.text.utf8_bytes))
        stride = math.ceil(_SAMPLE_BLOCK / share)
        samples = []
        position = 0
        for block in self.blocks("train"):
            text = block.replace(END, "")
            for start in range(-(position % stride), len(text), stride):
                samples.append(text[max(start, 0) : max(start + _SAMPLE_BLOCK, 0)])
            position += len(text)
        return samples


def has_many_documents(text: Text, fraction: Fraction) -> bool:
    """Return True if documents are split by default: each split then has at least 10."""
    return text.documents * min(fraction, 1 - fraction) >= _ENOUGH


def _documents_of(blocks: Iterable[str], fraction: Fraction, *, for_val: bool) -> Iterator[str]:
    """Yield the documents that are chosen for validation, or the others."""
    all_chosen = chosen_documents(fraction)
    chosen = next(all_chosen)
    document = 0
    for block in blocks:
        kept = []
        *ended, open_one = block.split(END)
        for text in ended:
            if (document == chosen) is for_val:
                kept.append(text + END)
            if document == chosen:
                chosen = next(all_chosen)
            document += 1
        if (document == chosen) is for_val:
            kept.append(open_one)
        yield "".join(kept)


def _part_of(blocks: Iterable[str], characters: int, *, is_tail: bool) -> Iterator[str]:
    """Yield the first `characters` characters with the ends in and behind them, or the rest."""
    left: int | None = characters  # None: all that follows is in the tail
    for block in blocks:
        place = 0
        if left is not None:
            place = left
            while (moved := left + block.count(END, 0, place)) != place:
                place = moved
            place += block.startswith(END, place)
            left = left - _count(block) if place >= len(block) else None
        yield block[place:] if is_tail else block[:place]
        if left is None and not is_tail:
            return


def _count(block: str) -> int:
    """Return the number of characters of a block."""
    return len(block) - block.count(END)
