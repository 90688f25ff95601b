"""The spool: one UTF-8 file with the text of a corpus, and the parts of it that are splits."""

from __future__ import annotations

import array
import codecs
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
from attnlm.base.formatting import listed
from attnlm.text.corpus import Corpus
from attnlm.text.text_files import BLOCK, END, TURN, NotTextError, check_size, without_marks
from attnlm.tokens.tokenizer import code_points, safe_blocks

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
    """The text of a corpus in the UTF-8 file `path`, with its marks as bytes.

    `characters` counts all but the marks. `sha256` covers the text and its marks, but the ends of
    documents only if the corpus marks them. `alphabet` has the distinct characters, sorted. `ends`
    are the byte offsets behind the documents, (D,), and `keys` a number for each. It is equal for
    documents, or first questions of examples, that differ at most in blanks at their ends and in
    the kind of their line ends.
    """

    corpus: Corpus
    path: Path
    size: int
    characters: int
    sha256: str
    alphabet: str
    ends: NDArray[np.int64]
    keys: NDArray[np.int64]

    def held_out(self, fraction: Fraction) -> NDArray[np.bool_]:
        """Return for each document if it is for validation, (D,): `fraction` of them.

        Examples with the same first question stand on the same side.
        """
        numbers = np.arange(len(self.ends))
        if self.corpus.questions is not None:
            _, first, numbers = np.unique(self.keys, return_index=True, return_inverse=True)
            numbers = np.argsort(np.argsort(first))[numbers]
        return np.isin(numbers, chosen_documents(fraction, int(numbers.max(initial=-1)) + 1))

    def parts(self, fraction: Fraction, by_documents: bool) -> tuple[Part, Part]:
        """Return the training and the validation split: the share `fraction` of the text, its tail
        or, if `by_documents`, some of its documents."""
        if by_documents:
            is_val = self.held_out(fraction)
            inner = np.stack([np.append(0, self.ends)[:-1][is_val], self.ends[is_val]], 1).ravel()
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

    def line_keys(self) -> NDArray[np.int64]:
        """Return a number for each line that is not blank, (L,). A line longer than a block is
        cut."""
        with self.path.open("rb") as file:
            read = iter(lambda: file.readline(BLOCK), b"")
            lines = (line.strip() for content in read for line in content.split(_END))
            # Numbers in place of lines: the text may be larger than the memory.
            return np.fromiter(map(hash, filter(None, lines)), np.int64)


@dataclass(frozen=True)
class Part:
    """Part of a spool: the ranges of its bytes from one offset to another, (R, 2)."""

    spool: Spool
    ranges: NDArray[np.int64]

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks that can be encoded apart.

        END follows documents if an end-of-text id will. Blocks of questions hold whole examples.
        """
        blocks = _read(self.spool.path, self.ranges)
        if self.spool.corpus.questions is not None:
            return filter(None, _whole_documents(blocks))
        if not self.spool.corpus.marks_ends:
            blocks = (block.replace(END, "") for block in blocks)
        return safe_blocks(blocks)

    def sample(self) -> list[str]:
        """Return the text, or blocks spread evenly over it if the spool is large."""
        size = self.spool.size - len(self.spool.ends)
        stride = max(_SAMPLE_BLOCK, math.ceil(Fraction(_SAMPLE_BLOCK * size, SAMPLE_BYTES)))
        samples = []
        position = 0
        for block in _read(self.spool.path, self.ranges):
            text = without_marks(block)
            for start in range(-(position % stride), len(text), stride):
                samples.append(text[max(start, 0) : max(start + _SAMPLE_BLOCK, 0)])
            position += len(text)
        return samples


def _whole_documents(blocks: Iterator[str]) -> Iterator[str]:
    """Yield the text in blocks that end with a document."""
    rest = ""
    for block in blocks:
        rest += block
        if len(rest) >= BLOCK:
            whole, end, rest = rest.rpartition(END)
            yield whole + end
    yield rest


def _read(path: Path, ranges: NDArray[np.int64]) -> Iterator[str]:
    """Yield these parts of a file in blocks, with their marks."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    with path.open("rb") as file:
        for begin, end in ranges:  # (R, 2)
            file.seek(begin)
            while begin < end and (content := file.read(min(BLOCK, end - begin))):
                begin += len(content)
                yield decoder.decode(content)


def read_spool(corpus: Corpus, path: Path, on_event: OnEvent) -> Spool:
    """Read a corpus once, into the new file `path`. Count and hash its text.

    Raises AttnlmError as `Corpus.texts` does, and if the text is empty or too long.
    """
    ends, keys, with_returns = _write_spool(corpus, path, on_event)
    size = path.stat().st_size
    check_size(size, corpus.max_bytes, path.parent, corpus.shown)
    whole, has_occurred, characters = hashlib.sha256(), np.zeros(0x110000, np.bool_), 0
    for block in _read(path, np.array([[0, size]])):
        marked = block.encode(errors="surrogateescape")
        text = without_marks(block)
        whole.update(marked if corpus.marks_ends else marked.replace(_END, b""))
        if text.isascii():
            known = [*np.flatnonzero(has_occurred[:128]), 0xFD, 0xFE, 0xFF]
            new: NDArray[Any] = np.frombuffer(marked.translate(None, bytes(known)), np.uint8)
        else:
            points = code_points(text)
            new = points[~has_occurred.take(points)]
        has_occurred[new] = True
        characters += len(text)
        on_event(Progress("read", characters, None, "chars"))
    if characters == 0:
        raise AttnlmError(f"{corpus.shown} is empty", "use a text that is not empty")
    if with_returns:
        shown = f"{listed(with_returns, 10)}: carriage returns (Windows line ends, CR LF) are kept"
        on_event(Note(f"{shown}; dos2unix converts CR LF to LF"))
    if has_occurred[0]:
        on_event(Note(f"{corpus.shown} has NUL characters: if it is UTF-16, name its `encoding`"))
    alphabet = "".join(map(chr, np.flatnonzero(has_occurred)))
    return Spool(corpus, path, size, characters, whole.hexdigest(), alphabet, ends, keys)


def _write_spool(
    corpus: Corpus, path: Path, on_event: OnEvent
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Write the text of a corpus to the new file `path`.

    Return the ends and keys of its documents, and the names of files with carriage returns. Files
    of folders that are no text, and empty files, are left out with a Note. Raises AttnlmError as
    `Corpus.texts` does, and if the text is too long, or the disk almost full.
    """
    left_out: list[str] = []
    with_returns: list[str] = []
    ends, keys, key = array.array("q"), bytearray(), hashlib.blake2b(digest_size=8)
    told, encoding = 0, corpus.files[0].encoding
    with path.open("wb") as spool:

        def put(text: str) -> None:
            nonlocal key, told
            spool.write(text.encode(errors="surrogateescape"))
            if corpus.has_documents:
                first = text.removesuffix(END).partition(TURN)[0].strip()
                key.update(first.replace("\r\n", "\n").replace("\r", "\n").encode())
                if text.endswith(END):
                    ends.append(spool.tell())
                    keys.extend(key.digest())
                    key = hashlib.blake2b(digest_size=8)
            if spool.tell() >= told + BLOCK:
                told = spool.tell()
                check_size(told, corpus.max_bytes, path.parent, corpus.shown)
                on_event(Progress("copy", told, None, "B"))

        for file in corpus.files:
            begin, documents, has_returns = spool.tell(), len(ends), False
            may_have_nuls = not file.optional or file.encoding.startswith(("utf-16", "utf-32"))
            try:
                if file.optional and not file.path.is_file():
                    raise NotTextError(f"{file.shown} is not a file", "leave it out", "no file")
                for text in corpus.texts(file):
                    if "\0" in text and not (may_have_nuls or file.is_records):
                        raise NotTextError(f"{file.shown} has a NUL", "leave it out", "NUL")
                    has_returns |= "\r" in text
                    put(text)
                if spool.tell() == begin:
                    left_out.append(f"{file.shown} (empty)")
                elif corpus.has_documents and not file.is_records:
                    put(END)
                with_returns += [file.shown] * has_returns
            except NotTextError as error:
                if not file.optional:
                    raise
                spool.seek(begin)
                spool.truncate()
                del ends[documents:], keys[8 * documents :]
                key = hashlib.blake2b(digest_size=8)
                left_out.append(f"{file.shown} ({error.place})")
    if not ends and corpus.files[0].optional:
        raise AttnlmError(
            f"no {encoding} text in {corpus.shown} ({len(corpus.files)} files were checked)",
            "name a folder or a pattern of text files, or set their `encoding`",
        )
    if left_out and ends:
        words = f"left out {len(left_out)} of {len(corpus.files)} files, empty or no "
        on_event(Note(f"{words}{encoding} text: {listed(left_out, 10)}"))
    return np.frombuffer(ends, np.int64), np.frombuffer(keys, np.int64), with_returns
