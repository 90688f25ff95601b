"""Files of text: found in folders, decompressed and decoded in pieces."""

from __future__ import annotations

import bisect
import codecs
import contextlib
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from attnlm.base.errors import AttnlmError, UsageError, import_optional
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.files import open_given
from attnlm.base.formatting import listed

RECORDS = (".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"  # a module
# The maximum number of characters in a piece of text, and of bytes in a read. All that is computed
# from such a piece, up to its token ids, fits into a processor's cache.
PIECE = 2**18


class NotTextError(AttnlmError):
    """Error for a file that is not text in the given encoding. `place` names the byte, if known."""

    def __init__(self, shown: str, reason: str, hint: str, place: str = "") -> None:
        super().__init__(f"{shown} {reason}{f' at {place}' if place else ''}", hint)
        self.place = place


class Piece(NamedTuple):
    """A piece of text of 1 to 2¹⁸ characters, and the offsets at which documents end.

    `ends` are offsets in characters, ascending and above 0. Each follows the last character of a
    document.
    """

    text: str
    ends: tuple[int, ...] = ()

    def cut(self, at: int) -> tuple[Piece, Piece]:
        """Return the first `at` characters of the piece, and the rest. Either may be empty."""
        first = bisect.bisect_right(self.ends, at)
        after = tuple(end - at for end in self.ends[first:])
        return Piece(self.text[:at], self.ends[:first]), Piece(self.text[at:], after)


def with_last_end(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the same pieces, but mark the end of the last piece as the end of a document."""
    end_mark = Piece("")
    for piece, following in itertools.pairwise(itertools.chain(pieces, [end_mark])):
        is_open = following is end_mark and piece.ends[-1:] != (len(piece.text),)
        yield Piece(piece.text, (*piece.ends, len(piece.text))) if is_open else piece


def bare_stem(path: Path) -> str:
    """Return a file's name without its suffixes: "cats" for cats.jsonl.gz."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem


def record_suffix(path: Path) -> str:
    """Return ".jsonl" or ".parquet" for a file of records, compressed or not; else ""."""
    bare = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    suffix = bare.suffix.lower()
    return suffix if suffix in RECORDS else ""


# --- Which files are texts ------------------------------------------------------------------------


def keep_text_files(
    paths: list[Path], where: str, encoding: str, on_event: OnEvent
) -> tuple[Path, ...]:
    """Return the text files among `paths` that are not empty. Report the other files as Notes.

    `where` is the folder or the pattern by which `paths` were found. Each file is decoded whole, so
    that the same rule holds wherever it has a byte that is not text.
    """
    texts = []
    empty = []
    not_text = []
    for number, path in enumerate(paths):
        on_event(Progress("check", number, len(paths), "files"))
        shown = str(path.relative_to(where) if Path(where) in path.parents else path)
        try:
            if _is_text(path, encoding):
                texts.append(path)
            else:
                empty.append(shown)
        except NotTextError as error:
            not_text.append(f"{shown} ({error.place})" if error.place else shown)
    if not texts:
        checked = f"{len(paths)} files were checked, {len(empty)} of them empty"
        raise AttnlmError(
            f"no {encoding} text in {where} ({checked})" if paths else f"no files found: {where}",
            "name a folder or a pattern of text files, or set their `encoding`",
        )
    for names, reason in ((not_text, f"not {encoding} text"), (empty, "empty")):
        if names:
            left_out = f"left out {len(names)} of {len(paths)} files because they are {reason}"
            on_event(Note(f"{left_out}: {listed(names, 10)}"))
    return tuple(texts)


def _is_text(path: Path, encoding: str) -> bool:
    """Return True for a text file, False for an empty one. Raises NotTextError for other files.

    A text file can be decoded. It has no NUL character, except in UTF-16 and UTF-32. A file of
    records (.jsonl or .parquet) counts as a text file by its name, and is not decoded.
    """
    shown = str(path)
    if not path.is_file():
        raise NotTextError(shown, "is not a file", "leave it out")
    if record_suffix(path):
        return path.stat().st_size > 0
    may_have_nuls = encoding.startswith(("utf-16", "utf-32"))
    is_text = False
    for piece in text_pieces(path, encoding, shown):
        if not may_have_nuls and "\0" in piece.text:
            raise NotTextError(shown, "has NUL characters", "leave it out")
        is_text = True
    return is_text


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


@contextlib.contextmanager
def open_decompressed(path: Path, shown: str) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its name ends with .gz or .zst.

    Raises AttnlmError if the file can't be decompressed, perhaps only during reading.
    """
    raw: Any
    damage_errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    with open_given(path) as file:
        match path.suffix.lower():
            case ".gz":
                raw = gzip.GzipFile(fileobj=file)
            case ".zst":
                zstd = import_optional(ZSTD, f"reading {shown}")
                raw = zstd.ZstdFile(file)
                damage_errors = (EOFError, zstd.ZstdError)
            case _:
                yield cast(BinaryIO, file)
                return
        try:
            with contextlib.closing(raw):
                yield cast(BinaryIO, io.BufferedReader(raw, PIECE))
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


def text_pieces(path: Path, encoding: str, shown: str) -> Iterator[Piece]:
    """Yield a file's text in pieces, without a byte order mark.

    Raises NotTextError, with the byte offset in the decompressed file, for bytes that are no text.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    chunk = None
    read = 0
    is_first = True
    with open_decompressed(path, shown) as file:
        while chunk != b"":
            chunk = file.read(PIECE)
            read += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                offset = 0
                if isinstance(error, UnicodeDecodeError):
                    # The decoder's bytes end where `chunk` ends, and may start before it.
                    offset = read - len(error.object) + error.start
                raise NotTextError(
                    shown,
                    f"is not valid {encoding}",
                    "convert it, or name its `encoding`, such as utf-16, cp1252 or shift_jis",
                    f"byte {offset}",
                ) from error
            if text and is_first:
                text = text.removeprefix("\ufeff")
                is_first = False
            # Some decoders hold characters back, and then return more than one read contained.
            for i in range(0, len(text), PIECE):
                yield Piece(text[i : i + PIECE])
