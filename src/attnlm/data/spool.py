"""The spool: one UTF-8 file with the text of a corpus, and the parts of it that are splits."""

from __future__ import annotations

import array
import codecs
import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.files import file_hash
from attnlm.base.formatting import listed
from attnlm.compute.threads import map_ahead
from attnlm.text.corpus import Corpus
from attnlm.text.text_files import BLOCK, COMPRESSED, END, NotTextError, check_size
from attnlm.tokens.tokenizer import code_points

# UTF-8 bytes. The trainer of byte pairs needs up to 100 times this memory if no word is repeated.
SAMPLE_BYTES = 2**22
_SAMPLE_BLOCK = 2**14  # characters
_END = END.encode(errors="surrogateescape")


def chosen_documents(fraction: Fraction, documents: int) -> list[int]:
    """Return the indices of the documents for validation.

    Of 1/`fraction` documents in a row, one is chosen. The choice of a document depends only on its
    index and the fraction.
    """
    chosen = []
    for row in range(math.ceil(documents * fraction)):
        first = math.ceil(row / fraction)
        end = math.ceil((row + 1) / fraction)
        digest = hashlib.blake2b(f"1 {row}".encode(), digest_size=8).digest()
        chosen.append(first + int.from_bytes(digest) % (end - first))
    return [index for index in chosen if index < documents]


@dataclass(frozen=True)
class Spool:
    """The text of a corpus in the UTF-8 file `path`, with the byte 0xFF behind each document.

    The file is the user's own if `is_own`. `sha256` covers the text and the ends of its documents,
    if the corpus marks them. `alphabet` has the distinct characters, sorted. `ends` are the byte
    offsets behind the documents, (D,), and `digests` a number for each, equal for documents that
    differ at most in blanks at their ends and in the kind of their line ends.
    """

    corpus: Corpus
    path: Path
    is_own: bool
    size: int
    characters: int
    sha256: str
    alphabet: str
    ends: NDArray[np.int64]
    digests: NDArray[np.int64]

    def parts(self, fraction: Fraction, by_documents: bool) -> tuple[Part, Part]:
        """Return the training and the validation split: the share `fraction` of the text, its tail
        or, if `by_documents`, some of its documents."""
        if by_documents:
            chosen = chosen_documents(fraction, len(self.ends))
            inner = np.stack([np.append(0, self.ends)[chosen], self.ends[chosen]], 1).ravel()
            edges = np.concatenate(([0], inner, [self.size]))
        else:
            cut = self._offset(math.floor(self.characters * (1 - fraction)))
            edges = np.array([0, cut, self.size, self.size])
        # The edges are the offsets at which one split follows the other.
        return Part(self, edges.reshape(-1, 2)), Part(self, edges[1:-1].reshape(-1, 2))

    def _offset(self, character: int) -> int:
        """Return the byte offset at which a character begins, given its index."""
        if self.characters == self.size:
            return character
        offset = 0
        with self.path.open("rb") as file:
            while content := file.read(BLOCK):
                # All bytes but 10xxxxxx, and the end of a document.
                signed = np.frombuffer(content, np.int8)
                begins = np.flatnonzero((signed >= -64) & (signed != -1))
                if character < len(begins):
                    return offset + int(begins[character])
                character -= len(begins)
                offset += len(content)
        return offset

    def check_unchanged(self) -> None:
        """Raise AttnlmError if the user's file has changed since it was read."""
        if self.is_own and file_hash(self.path) != self.sha256:
            raise AttnlmError(
                f"{self.corpus.shown} changed while it was read",
                "try again when no other program writes to it",
            )


@dataclass(frozen=True)
class Part:
    """Part of a spool: the ranges of its bytes from one offset to another, (R, 2)."""

    spool: Spool
    ranges: NDArray[np.int64]

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks. END follows documents if an end-of-text id will."""
        marks_ends = self.spool.corpus.marks_ends
        for block in _read(self.spool.path, self.ranges):
            yield block if marks_ends else block.replace(END, "")

    def lines(self) -> Iterator[str]:
        """Yield the lines that are not blank. A line longer than a block is cut."""
        rest = ""
        for block in _read(self.spool.path, self.ranges):
            *lines, rest = (rest + block.replace(END, "\n")).split("\n")
            yield from filter(None, map(str.strip, lines))
            if len(rest) > BLOCK:
                yield rest
                rest = ""
        yield from filter(None, [rest.strip()])

    def sample(self) -> list[str]:
        """Return the text, or blocks spread evenly over it if the spool is large."""
        size = self.spool.size - len(self.spool.ends)
        stride = math.ceil(_SAMPLE_BLOCK / min(Fraction(1), Fraction(SAMPLE_BYTES, size)))
        samples = []
        position = 0
        for block in self.blocks():
            text = block.replace(END, "")
            for start in range(-(position % stride), len(text), stride):
                samples.append(text[max(start, 0) : max(start + _SAMPLE_BLOCK, 0)])
            position += len(text)
        return samples


def _read(path: Path, ranges: NDArray[np.int64]) -> Iterator[str]:
    """Yield these parts of a file in blocks. END follows documents."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with path.open("rb") as file:
        for begin, end in ranges:  # (R, 2)
            file.seek(begin)
            while begin < end and (content := file.read(min(BLOCK, end - begin))):
                begin += len(content)
                yield decoder.decode(content)


def read_spool(corpus: Corpus, path: Path, on_event: OnEvent) -> Spool:
    """Read a corpus once, into the new file `path` unless it is one UTF-8 file without documents.

    Count and hash its text. Raises AttnlmError as `Corpus.texts` does, and if the text is empty or
    too long.
    """
    blocks = corpus.texts(corpus.files[0])
    if is_own := _is_utf8(corpus):
        path = corpus.files[0].path
        size, with_returns = path.stat().st_size, [corpus.shown]
    else:
        with_returns = _write_spool(corpus, path, on_event)
        size = path.stat().st_size
        blocks = _read(path, np.array([[0, size]]))
    check_size(size, corpus.max_bytes, path.parent, corpus.shown)
    whole, document = hashlib.sha256(), _DocumentHash()
    ends, digests, has_occurred = array.array("q"), bytearray(), np.zeros(0x110000, np.bool_)
    place = 0

    def survey(block: str) -> int:
        """Hash a block, note its documents and characters, and return the number of characters."""
        nonlocal document, place
        content = marked = block.encode(errors="surrogateescape")
        if corpus.has_documents:
            *ended, rest = content.split(_END)
            for text in ended:
                document.update(text)
                digests.extend(document.digest())
                document = _DocumentHash()
                place += len(text) + 1
                ends.append(place)
            document.update(rest)
            place += len(rest)
            content, block = content.replace(_END, b""), block.replace(END, "")
        whole.update(marked if corpus.marks_ends else content)
        if len(content) == len(block):
            known_bytes = np.flatnonzero(has_occurred[:128]).astype(np.uint8).tobytes()
            new: NDArray[Any] = np.frombuffer(content.translate(None, known_bytes), np.uint8)
        else:
            points = code_points(block)
            new = points[~has_occurred.take(points)]
        has_occurred[new] = True
        return len(block)

    characters = 0
    with contextlib.closing(map_ahead(survey, blocks)) as surveyed:
        for count in surveyed:
            characters += count
            on_event(Progress("read", characters, None, "chars"))
    if characters == 0:
        raise AttnlmError(f"{corpus.shown} is empty", "use a text that is not empty")
    if has_occurred[ord("\r")]:
        shown = f"{listed(with_returns, 10)}: carriage returns (Windows line ends, CR LF) are kept"
        on_event(Note(f"{shown}; dos2unix converts CR LF to LF"))
    if has_occurred[0]:
        on_event(Note(f"{corpus.shown} has NUL characters: if it is UTF-16, name its `encoding`"))
    return Spool(
        corpus,
        path,
        is_own,
        size,
        characters,
        whole.hexdigest(),
        "".join(map(chr, np.flatnonzero(has_occurred))),
        np.frombuffer(ends, np.int64),
        np.frombuffer(digests, np.int64),
    )


class _DocumentHash:
    """A hash of a document that comes in pieces, without blanks at its ends, and with LF for CR LF
    and CR."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._blanks: bytes | None = None
        """those at the end so far, which count if more follows; None before the first character"""
        self.digest = self._hash.digest

    def update(self, piece: bytes) -> None:
        text = piece.lstrip() if self._blanks is None else self._blanks + piece
        kept = text.rstrip()
        self._hash.update(kept.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        if kept:
            self._blanks = text[len(kept) :]
        elif self._blanks is not None:
            self._blanks = text


def _is_utf8(corpus: Corpus) -> bool:
    """Return True if a corpus is one file that is like its spool: UTF-8 without documents."""
    file = corpus.files[0]
    if corpus.has_documents or file.stream or file.encoding != "utf-8":
        return False
    if file.path.suffix.lower() in COMPRESSED:
        return False
    with file.path.open("rb") as opened:
        return opened.read(3) != codecs.BOM_UTF8


def _write_spool(corpus: Corpus, path: Path, on_event: OnEvent) -> list[str]:
    """Write the text of a corpus to the new file `path`, in UTF-8, with 0xFF behind each document.

    Return the names of the files with carriage returns. Files of folders that are no text, and
    empty files, are left out with a Note. Raises AttnlmError as `Corpus.texts` does, and if the
    text is too long, or the disk almost full.
    """
    not_text: list[str] = []
    empty: list[str] = []
    with_returns: list[str] = []
    told, encoding = 0, corpus.files[0].encoding
    with path.open("wb") as spool:
        for file in corpus.files:
            begin = spool.tell()
            has_returns = False
            may_have_nuls = not file.optional or file.encoding.startswith(("utf-16", "utf-32"))
            try:
                if file.optional and not file.path.is_file():
                    raise NotTextError(f"{file.shown} is not a file", "leave it out")
                for text in corpus.texts(file):
                    if "\0" in text and not (may_have_nuls or file.is_records):
                        raise NotTextError(f"{file.shown} has NUL characters", "leave it out")
                    has_returns = has_returns or "\r" in text
                    spool.write(text.encode(errors="surrogateescape"))
                    if spool.tell() >= told + BLOCK:
                        told = spool.tell()
                        check_size(told, corpus.max_bytes, path.parent, corpus.shown)
                        on_event(Progress("copy", told, None, "B"))
            except NotTextError as error:
                if not file.optional:
                    raise
                spool.seek(begin)
                spool.truncate()
                not_text.append(f"{file.shown} ({error.place})" if error.place else file.shown)
                continue
            if spool.tell() == begin:
                empty.append(file.shown)
            elif corpus.has_documents and not file.is_records:
                spool.write(_END)
            with_returns += [file.shown] * has_returns
    kept = len(corpus.files) - len(not_text) - len(empty)
    if not kept and corpus.files[0].optional:
        raise AttnlmError(
            f"no {encoding} text in {corpus.shown} ({len(corpus.files)} files were checked, "
            f"{len(empty)} of them empty)",
            "name a folder or a pattern of text files, or set their `encoding`",
        )
    for names, reason in ((not_text, f"not {encoding} text"), (empty, "empty")):
        if names and kept:
            left_out = f"left out {len(names)} of {len(corpus.files)} files because they are"
            on_event(Note(f"{left_out} {reason}: {listed(names, 10)}"))
    return with_returns
