"""Files of text: found in folders, decompressed and decoded in blocks."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.base.files import open_given
from attnlm.base.formatting import quantity

RECORDS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"  # a module
# The number of bytes in a read, and the most characters in a block of text. All that is computed
# from such a block, up to its token ids, fits into a processor's cache.
BLOCK = 2**18
_MARKED = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins like that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
END, TURN, ANSWER_END = "\udcff", "\udcfe", "\udcfd"
"""Marks in a text: the end of a document; in a question with its answer, the place where the answer
or the next question begins; and the end of an answer. They are the bytes 0xFF, 0xFE and 0xFD, which
UTF-8 never has, as "surrogateescape" decodes them: no text has these halves of surrogate pairs."""

# A text without an end, such as a pipe, must not fill the disk: bytes, and a part of the disk. Only
# texts of more than _SMALL bytes are checked.
_LEAST_FREE, _LEAST_PART, _SMALL = 10**9, 0.05, 2**26

OpenStream: TypeAlias = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens a stream, which can be read once."""
Rows: TypeAlias = Iterator[tuple[str, Any]]
"""Records, each a mapping of columns to values if it is valid, after the name of its place."""


def check_size(size: int, most: int | None, folder: Path, shown: str) -> None:
    """Raise AttnlmError if `size` bytes, written to `folder`, are too many, or its disk is full."""
    if most is not None and size > most:
        raise AttnlmError(f"{shown} has more than {most:,} bytes", "raise `max_bytes`")
    if size > _SMALL:
        disk = shutil.disk_usage(folder)
        if disk.free < min(_LEAST_FREE, _LEAST_PART * disk.total):
            raise AttnlmError(
                f"only {quantity(disk.free, 'B')} of the disk is free: {shown} is too long for it",
                "free some space, or name a `data_dir` on another disk",
            )


def without_marks(text: str) -> str:
    """Return `text` without the marks of documents, questions and answers."""
    return text.replace(END, "").replace(TURN, "").replace(ANSWER_END, "")


class NotTextError(AttnlmError):
    """Error for a file that is not text in the given encoding, or damaged: `place` says where or
    why."""

    def __init__(self, message: str, hint: str, place: str) -> None:
        super().__init__(message, hint)
        self.place = place


def bare_name(path: Path) -> Path:
    """Return a file's name without the suffix of its compression: cats.jsonl for cats.jsonl.gz."""
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path.name)


def record_suffix(path: Path) -> str:
    """Return one of RECORDS for the name of such a file, compressed or not; else ""."""
    suffix = bare_name(path).suffix.lower()
    return suffix if suffix in RECORDS else ""


@dataclass(frozen=True)
class TextFile:
    """A file, a stream that is read once, or a data set of the Hub.

    `shown` is its name in messages. `format` is one of RECORDS for records, "" for a text; records
    ignore `encoding`. `stream` opens a pipe in place of `path`, whose suffix still says how it is
    compressed. A file that is `optional`, as it was found in a folder, is left out if it is no
    text. `rows` yields the records of a data set of the Hub. `examples` are those of a task.
    """

    path: Path
    shown: str
    encoding: str = "utf-8"
    format: str = ""
    stream: OpenStream | None = None
    optional: bool = False
    rows: Callable[[Sequence[str]], Rows] | None = None
    examples: Sequence[str] = ()

    @property
    def is_records(self) -> bool:
        """Return True if the file holds records, each with columns."""
        return self.rows is not None or bool(self.format or self.examples)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file, decompressed if its name ends with .gz or .zst.

        Raises NotTextError if it can't be decompressed, perhaps only during reading.
        """
        raw: Any
        damage_errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        with open_given(self.path) if self.stream is None else self.stream() as file:
            match self.path.suffix.lower():
                case ".gz":
                    raw = gzip.GzipFile(fileobj=file)
                case ".zst":
                    zstd = import_optional(ZSTD, f"reading {self.shown}")
                    raw = zstd.ZstdFile(file)
                    damage_errors = (EOFError, zstd.ZstdError)
                case _:
                    yield file
                    return
            try:
                with contextlib.closing(raw):
                    yield cast(BinaryIO, io.BufferedReader(raw, BLOCK))
            except damage_errors as error:
                reason = "it ends too early" if isinstance(error, EOFError) else str(error)
                reason = reason or "it is not valid"
                raise NotTextError(
                    f"cannot decompress {self.shown}: {reason}",
                    "copy or download it again; `gzip -t` and `zstd -t` check such files",
                    reason,
                ) from None

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks, without a byte order mark, which decides instead of UTF-8.

        Raises NotTextError, with the byte offset, for bytes that are no text in the encoding.
        """
        read = 0
        is_first = True
        with self.open() as file:
            chunk, encoding = file.read(BLOCK), self.encoding
            if encoding == "utf-8":
                marked = (name for mark, name in _MARKED.items() if chunk.startswith(mark))
                encoding = next(marked, encoding)
            decoder = codecs.getincrementaldecoder(encoding)()
            while True:
                read += len(chunk)
                try:
                    text = decoder.decode(chunk, final=not chunk)
                    text.encode()  # some encodings have codes for half a surrogate pair
                except UnicodeError as error:
                    is_half = isinstance(error, UnicodeEncodeError)
                    place = "half a surrogate pair" if is_half else "byte 0"
                    if isinstance(error, UnicodeDecodeError):
                        # The decoder's bytes end where `chunk` ends, and may start before it.
                        place = f"byte {read - len(error.object) + error.start}"
                    raise NotTextError(
                        f"{self.shown} is not valid {encoding} at {place}",
                        "convert it, or name its `encoding`, such as utf-16, cp1252 or shift_jis",
                        place,
                    ) from error
                if text and is_first:
                    text = text.removeprefix("\ufeff")
                    is_first = False
                yield text
                if not chunk:
                    return
                chunk = file.read(BLOCK)


def files_in(path: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the file `path`, or all files below the folder `path`, sorted by name at each level.

    Hidden files and folders below `path` are left out. `above` are the folders that contain `path`:
    a link back to such a folder is not followed.
    """
    if not path.is_dir():
        yield path
    elif (real := path.resolve()) not in above:
        for inner in sorted(path.iterdir(), key=lambda inner: inner.name):
            if not inner.name.startswith("."):
                yield from files_in(inner, above | {real})


def text_encoding(name: str) -> str:
    """Return Python's name for a text encoding. Raises UsageError for an unknown encoding."""
    try:
        b" ".decode(name, "replace")  # rejects codecs that do not decode bytes to text
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise UsageError(
            f"unknown text encoding: {name!r}",
            "use one that Python knows, such as utf-8, utf-16, latin-1 or shift_jis",
        ) from None
