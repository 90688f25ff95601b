"""Files of text: found in folders, decompressed and decoded in blocks."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.base.files import open_given
from attnlm.base.formatting import byte_size

RECORDS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"  # a module
# The number of bytes in a read, and the most characters in a block of text. All that is computed
# from such a block, up to its token ids, fits into a processor's cache.
BLOCK = 2**18
END = "\udcff"
"""The end of a document: the byte 0xFF, which UTF-8 never has, as "surrogateescape" decodes it to a
str. No text has this character, half a surrogate pair."""


# A text without an end, such as a pipe, must not fill the disk: bytes, and a part of the disk. Only
# texts of more than _SMALL bytes are checked.
_LEAST_FREE, _LEAST_PART, _SMALL = 10**9, 0.05, 2**26


def check_size(size: int, most: int | None, folder: Path, shown: str) -> None:
    """Raise AttnlmError if `size` bytes, written to `folder`, are too many, or its disk is full."""
    if most is not None and size > most:
        raise AttnlmError(f"{shown} has more than {most:,} bytes", "raise `max_bytes`")
    if size > _SMALL:
        disk = shutil.disk_usage(folder)
        if disk.free < min(_LEAST_FREE, _LEAST_PART * disk.total):
            raise AttnlmError(
                f"only {byte_size(disk.free)} of the disk is free: {shown} is too long for it",
                "free some space, or name a `data_dir` on another disk",
            )


class NotTextError(AttnlmError):
    """Error for a file that is not text in the given encoding. `place` names the byte, if known."""

    def __init__(self, shown: str, reason: str, hint: str, place: str = "") -> None:
        super().__init__(f"{shown} {reason}{f' at {place}' if place else ''}", hint)
        self.place = place


def bare_stem(path: Path) -> str:
    """Return a file's name without its suffixes: "cats" for cats.jsonl.gz."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem


def record_suffix(path: Path) -> str:
    """Return one of RECORDS for the name of such a file, compressed or not; else ""."""
    bare = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    suffix = bare.suffix.lower()
    return suffix if suffix in RECORDS else ""


# --- Which files are texts ------------------------------------------------------------------------


def files_in(path: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the file `path`, or all files below the folder `path`, sorted by name at each level.

    Hidden files and folders below `path` are left out. `above` are the folders that contain `path`:
    a link back to such a folder is not followed.
    """
    if not path.is_dir():
        yield path
        return
    real = path.resolve()
    if real not in above:
        for inner in sorted(path.iterdir(), key=lambda inner: inner.name):
            if not inner.name.startswith("."):
                yield from files_in(inner, above | {real})


# --- Bytes ----------------------------------------------------------------------------------------


OpenStream: TypeAlias = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens a stream, which can be read once."""


@contextlib.contextmanager
def open_decompressed(
    path: Path, shown: str, stream: OpenStream | None = None
) -> Iterator[BinaryIO]:
    """Open a file, or `stream` in its place, decompressed if its name ends with .gz or .zst.

    Raises AttnlmError if the content can't be decompressed, perhaps only during reading.
    """
    raw: Any
    damage_errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    with open_given(path) if stream is None else stream() as file:
        match path.suffix.lower():
            case ".gz":
                raw = gzip.GzipFile(fileobj=file)
            case ".zst":
                zstd = import_optional(ZSTD, f"reading {shown}")
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
            raise AttnlmError(
                f"cannot decompress {shown}: {reason or 'it is not valid'}",
                "copy or download it again; `gzip -t` and `zstd -t` check such files",
            ) from None


# --- Characters -----------------------------------------------------------------------------------


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


def text_blocks(file: BinaryIO, encoding: str, shown: str, errors: str = "strict") -> Iterator[str]:
    """Yield the text of an open file in blocks, without a byte order mark.

    Raises NotTextError, with the byte offset, for bytes that are no text in the encoding.
    """
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    read = 0
    is_first = errors == "strict"  # only a user's file may begin with a mark
    while True:
        chunk = file.read(BLOCK)
        read += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
            if errors == "strict":
                text.encode()  # some encodings have codes for half a surrogate pair
        except UnicodeError as error:
            place = "" if isinstance(error, UnicodeEncodeError) else "byte 0"
            if isinstance(error, UnicodeDecodeError):
                # The decoder's bytes end where `chunk` ends, and may start before it.
                place = f"byte {read - len(error.object) + error.start}"
            raise NotTextError(
                shown,
                f"is not valid {encoding}",
                "convert it, or name its `encoding`, such as utf-16, cp1252 or shift_jis",
                place,
            ) from error
        if text and is_first:
            text = text.removeprefix("\ufeff")
            is_first = False
        yield text
        if not chunk:
            return
