"""Files of text: found in folders, decompressed and decoded in a stream."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import importlib
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.files import open_regular

RECORDS, COMPRESSED = (".jsonl", ".parquet"), (".gz", ".zst")
# The most characters in a piece of text, and the bytes in a read: so small that what is computed
# from a piece on the way to ids stays in a processor's cache.
PIECE = 2**18
SNIFFED_BYTES = 2**13  # of each file in a folder, to tell text from the rest
UTF16_SNIFFED_BYTES = 2**16


def bare_stem(path: Path) -> str:
    """Return a file's name without how it is stored: "cats" for cats.jsonl.gz."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem


def kind_of(path: Path) -> str:
    """Return ".jsonl" or ".parquet" for a file of records, compressed or not; else ""."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in RECORDS else ""


# --- Which files are texts ------------------------------------------------------------------------


def texts_in(folder: Path, encoding: str, on_event: OnEvent) -> tuple[Path, ...]:
    """Return the text files in `folder`, in the order of their paths; Notes name the others."""
    return _texts_among(_files_in(folder, frozenset()), str(folder), encoding, on_event)


def texts_matching(pattern: str, encoding: str, on_event: OnEvent) -> tuple[Path, ...]:
    """Return the text files that match a pattern with *, ?, [] or **, also in matching folders."""
    files: dict[Path, None] = {}
    matching = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - it may be absolute
    for path in map(Path, matching):
        found = _files_in(path, frozenset()) if path.is_dir() else (path,)
        files |= dict.fromkeys(found)
    if not files:
        raise AttnlmError(
            f"no file matches {pattern!r}", "check the pattern, and the current folder"
        )
    return _texts_among(files, pattern, encoding, on_event)


def _texts_among(
    paths: Iterable[Path], where: str, encoding: str, on_event: OnEvent
) -> tuple[Path, ...]:
    texts: list[Path] = []
    others: list[Path] = []
    empty: list[Path] = []
    for path in paths:
        start = _start_of(path, encoding)
        (others if start is None else texts if start else empty).append(path)
    count = len(texts) + len(others) + len(empty)
    if not texts:
        raise AttnlmError(
            f"no {encoding} text in {where} ({count} files looked at, {len(empty)} of them empty)",
            "give a folder with text files in it, or name their `encoding`",
        )
    for left, what in ((others, f"not {encoding} text"), (empty, "empty")):
        if left:
            named = [str(p.relative_to(where) if Path(where) in p.parents else p) for p in left[:3]]
            more = ", …" if len(left) > 3 else ""
            left_out = f"left out {len(left)} of {count} files, which are {what}"
            on_event(Note(f"{left_out}: {', '.join(named)}{more}"))
    return tuple(texts)


def _start_of(path: Path, encoding: str) -> str | None:
    """Return the first characters of a text file; None for any other file.

    A text decodes and has no NUL byte, unless its encoding is wide. Records are known by the file's
    name alone.
    """
    if not path.is_file():
        return None
    if kind_of(path):
        return "records" if path.stat().st_size else ""
    with opened(path, str(path)) as file:
        start = file.read(SNIFFED_BYTES)
    if b"\0" in start and not encoding.startswith(("utf-16", "utf-32")):
        return None
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
        return decoder.decode(start, final=len(start) < SNIFFED_BYTES).removeprefix("\ufeff")
    except UnicodeError:
        return None


def _files_in(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """Yield all files below `folder`, by name at each level; `above` are the folders it is in."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return  # a link that leads back up
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_in(path, above | {identity})
        else:
            yield path


# --- Bytes ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, shown: str) -> Iterator[BinaryIO]:
    """Open a regular file for reading, decompressed if its name ends with .gz or .zst.

    Raises AttnlmError, here or as it is read, for what does not decompress; `shown` is the file's
    name for the user. Raises OSError for what can't be read.
    """
    suffix = path.suffix.lower()
    with open_regular(path) as file:
        if suffix not in COMPRESSED:
            yield cast(BinaryIO, file)
            return
        raw: Any = gzip.GzipFile(fileobj=file) if suffix == ".gz" else _zstd(shown).ZstdFile(file)
        try:
            with contextlib.closing(raw):
                yield cast(BinaryIO, io.BufferedReader(raw, PIECE))
        except Exception as error:
            is_damage = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
            # ZstdError is of a module that may not be there.
            if not is_damage and type(error).__name__ != "ZstdError":
                raise
            reason = "it ends too early" if isinstance(error, EOFError) else str(error)
            raise AttnlmError(
                f"can't decompress {shown}: {reason or 'it is not valid'}",
                "copy or download it again; `gzip -t` and `zstd -t` test such files",
            ) from None


def _zstd(shown: str) -> ModuleType:
    try:
        return importlib.import_module("compression.zstd")  # Python 3.14
    except ModuleNotFoundError:
        return optional("backports.zstd", f"reading {shown}")


def optional(name: str, what: str) -> ModuleType:
    """Import a module of an optional dependency; raises AttnlmError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        package = error.name if error.name != "backports" else name
        raise AttnlmError(
            f"{what} needs the Python package {package}, which is not installed",
            f"install it: pip install {package}",
        ) from None


# --- Characters -----------------------------------------------------------------------------------


def text_encoding(name: str) -> str:
    """Return Python's own name for a text encoding; raises UsageError for any other."""
    try:
        b" ".decode(name, "replace")  # refuses codecs that are not from bytes to text
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise UsageError(
            f"unknown text encoding: {name!r}",
            "give one that Python knows, such as utf-8, utf-16, latin-1 or shift_jis",
        ) from None


def decoded(path: Path, encoding: str, newlines: str, shown: str) -> Iterator[str]:
    """Yield a file's text in strings of any length; `shown` is the file's name for the user.

    Places in a compressed file are counted in bytes of the decompressed content.
    """
    decoder: codecs.IncrementalDecoder | io.IncrementalNewlineDecoder
    decoder = codecs.getincrementaldecoder(encoding)()
    if newlines == "unix":
        decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    read = 0  # bytes
    try:
        with opened(path, shown) as file:
            chunk = file.read(PIECE)
            start = chunk[:UTF16_SNIFFED_BYTES]
            if encoding == "utf-8" and _is_full_of_nuls(start):
                raise AttnlmError(
                    f"{shown} looks like UTF-16: many of its bytes are NUL",
                    f"if it is a text, try `encoding` {_likely_encoding(start, encoding)}",
                )
            while chunk:
                read += len(chunk)
                yield decoder.decode(chunk)
                chunk = file.read(PIECE)
            yield decoder.decode(b"", final=True)
    except UnicodeError as error:
        offset = 0
        if isinstance(error, UnicodeDecodeError):
            # The decoder's bytes end where our reading ends, and may start in the chunk before.
            offset = read - len(error.object) + error.start
        raise AttnlmError(
            f"{shown} is not valid {encoding} at byte {offset}",
            f"name its encoding, perhaps `encoding` {_likely_encoding(start, encoding)}",
        ) from error
    except OSError as error:
        raise unreadable(shown, error) from error


def unreadable(shown: object, error: OSError) -> AttnlmError:
    """Return the error for a file that the system does not let us read."""
    return AttnlmError(
        f"can't read {shown}: {error.strerror}", "check the path and its permissions"
    )


def _is_full_of_nuls(start: bytes) -> bool:
    """Return True if a quarter is NUL: text in UTF-16 often is, and would be valid, odd UTF-8."""
    return 4 * start.count(0) >= len(start) > 0


def _likely_encoding(start: bytes, refused: str) -> str:
    """Return what to try for a file with this start that is not in the encoding `refused`."""
    has_mark = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if has_mark and refused != "utf-16":
        return "utf-16"
    if refused == "utf-16" or _is_full_of_nuls(start):
        return "utf-16-le" if start[1::2].count(0) >= start[::2].count(0) else "utf-16-be"
    return "latin-1"
