"""Text from wherever the user has it: a named corpus, a file, a folder, the web, a pipe."""

from __future__ import annotations

import codecs
import difflib
import io
import itertools
import os
import re
import shutil
import stat
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias
from urllib.parse import unquote, urlsplit

from attnlm.download import cached, fetch, without_password
from attnlm.errors import AttnlmError, UsageError
from attnlm.events import Note, OnEvent, ignore
from attnlm.files import open_regular, write_bytes

TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_SHAKESPEARE_BYTES = 1_115_394
DEFAULT_DEADLINE = 15.0  # seconds that the default corpus may take, before `tales` replaces it

# Characters at most in a piece of decoded text, and bytes in a read: what is made of it on the way
# to ids stays in a processor's cache.
PIECE = 2**18
SNIFFED_BYTES = 2**13  # of each file in a folder, to tell text from the rest
UTF16_SNIFFED_BYTES = 2**16

NAMES = ("tinyshakespeare", "tales")
NEWLINES = ("keep", "unix")
SOURCES = "a file, a folder, a URL, tinyshakespeare, tales, or - for stdin"
_MOST_IN_SOURCES = 2**20  # characters, of all sources together
# Windows opens a device under these names, whatever the case and the extension.
DEVICE_NAME = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\.|$)", re.I)


@dataclass(frozen=True)
class Corpus:
    """A text in files, not yet read.

    `name` is safe as a file name on every system, `source` is what the user named. The text is
    that of `files`, or of `parts` where several sources were named, one after the other. With
    `newlines` "keep" line ends are as they are; with "unix" CR LF and CR become LF. `floor_nats`,
    for `tales` only, maps the character offset of each story to −ln p of all the text from there
    to the end.
    """

    name: str
    source: str
    files: tuple[Path, ...]
    encoding: str = "utf-8"
    newlines: str = "keep"
    floor_nats: Mapping[int, float] | None = None
    parts: tuple[Corpus, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """What the user named, one by one."""
        return tuple(part.source for part in self.parts) or (self.source,)

    @property
    def shown(self) -> str:
        """What the user named, for messages."""
        return "stdin" if self.source == "-" else self.source

    def pieces(self) -> Iterator[str]:
        """The text, in pieces of 1 to 2¹⁸ characters, without byte order marks.

        Raises AttnlmError for a file that can't be read, with the byte offset where it can't be
        decoded.
        """
        for part in self.parts:
            yield from part.pieces()
        for path in self.files:
            shown = str(path) if Path(self.source) in path.parents else self.shown
            texts = filter(None, _decoded(path, self.encoding, self.newlines, shown))
            first = next(texts, "").removeprefix("\ufeff")
            for text in itertools.chain([first], texts):
                # Some encodings hold characters back, then give more of them than were read.
                for i in range(0, len(text), PIECE):
                    yield text[i : i + PIECE]


Source: TypeAlias = str | os.PathLike[str]


def get_corpus(
    source: Source | Iterable[Source] | None,
    *,
    encoding: str = "utf-8",
    newlines: str = "keep",
    offline: bool = False,
    spool: Path,
    on_event: OnEvent = ignore,
    stdin: BinaryIO | None = None,
) -> Corpus:
    """The text that `source` names: a named corpus, "-", an http(s) URL, a file or a folder.

    Several sources make one text, in their order. None is Tiny Shakespeare, or `tales` where that
    can't be had in 15 seconds. A path object always means a path. What can't be read twice is
    copied once into the existing folder `spool`, which must outlive the corpus. `encoding` is that
    of the user's own text, `newlines` one of NEWLINES. The environment variable
    `ATTNLM_TINYSHAKESPEARE_URL` names a mirror of Tiny Shakespeare: the same bytes.

    Raises AttnlmError for a text that can't be had, UsageError for an unknown encoding, and for
    no source at all.
    """
    encoding = _text_encoding(encoding)

    def one(source: Source | None) -> Corpus:
        corpus = _corpus(source, encoding, offline, spool, on_event, stdin)
        return replace(corpus, newlines=newlines)

    if source is None or isinstance(source, (str, os.PathLike)):
        return one(source)
    return _joined(tuple(map(one, source)), encoding, on_event)


def _joined(parts: tuple[Corpus, ...], encoding: str, on_event: OnEvent) -> Corpus:
    """The parts as one text."""
    if not parts:
        raise UsageError("no source was given", f"give {SOURCES}")
    if len(parts) == 1:
        return parts[0]
    if sum(len(part.source) for part in parts) > _MOST_IN_SOURCES:
        raise UsageError(f"{len(parts):,} sources are too many", "give the folder that they are in")
    for part in parts:
        if not any(part.pieces()):
            on_event(Note(f"{part.shown} is empty"))
    first, others = parts[0], len(parts) - 1
    name, source = f"{first.name}-and-{others}-more", f"{first.shown} and {others} more"
    return Corpus(name, source, (), encoding, first.newlines, parts=parts)


def _corpus(
    source: Source | None,
    encoding: str,
    offline: bool,
    spool: Path,
    on_event: OnEvent,
    stdin: BinaryIO | None,
) -> Corpus:
    match source:
        case None:
            return _default(offline, spool, on_event)
        case "tinyshakespeare":
            return _tiny_shakespeare(offline, spool, None, on_event)
        case "tales":
            return _tales(spool)
        case "-":
            return Corpus("stdin", "-", (_stdin(stdin, spool),), encoding)
        case str() if "://" in source:
            return _from_web(source, encoding, offline, spool, on_event)
        case "":
            raise _not_found("")
        case _:
            return _from_path(os.fspath(source), encoding, spool, on_event)


def safe_name(text: str) -> str:
    """`text` as a name for files and folders on every system: never empty, never "latest"."""
    kept = (
        character if character.isprintable() and character not in ' <>:"/\\|?*' else "-"
        for character in unicodedata.normalize("NFC", text)
    )
    # Most systems allow 255 bytes, of which the rest of a data set's name needs some.
    short = "".join(kept).strip("-.").encode()[:100].decode(errors="ignore").rstrip("-.")
    if not short:
        return "text"
    return f"text-{short}" if DEVICE_NAME.match(short) or short.lower() == "latest" else short


# --- Where a text comes from ----------------------------------------------------------------------


def _default(offline: bool, spool: Path, on_event: OnEvent) -> Corpus:
    try:
        return _tiny_shakespeare(offline, spool, DEFAULT_DEADLINE, on_event)
    except AttnlmError as error:
        on_event(Note(f"{error.message}; using `tales`, which needs no network, instead"))
        return _tales(spool)


def _tiny_shakespeare(
    offline: bool, spool: Path, deadline: float | None, on_event: OnEvent
) -> Corpus:
    path = cached(
        os.environ.get("ATTNLM_TINYSHAKESPEARE_URL") or TINY_SHAKESPEARE_URL,
        "tinyshakespeare.txt",
        sha256=TINY_SHAKESPEARE_SHA256,
        max_bytes=TINY_SHAKESPEARE_BYTES,
        spool=spool,
        offline=offline,
        deadline=deadline,
        on_event=on_event,
    )
    return Corpus("tinyshakespeare", "tinyshakespeare", (path,))


def _tales(spool: Path) -> Corpus:
    from attnlm import tales

    made = tales.generate()
    path = spool / "tales.txt"
    write_bytes(path, made.text.encode())
    return Corpus("tales", "tales", (path,), floor_nats=made.floor_nats)


def _from_web(url: str, encoding: str, offline: bool, spool: Path, on_event: OnEvent) -> Corpus:
    if offline:
        raise AttnlmError(
            f"{without_password(url)} needs the network, which --offline forbids",
            "pass a file, or use `attnlm prepare tales`",
        )
    path = Path(tempfile.mkdtemp(dir=spool)) / "download"
    fetch(url, path, on_event=on_event)
    parts = urlsplit(url)
    name = safe_name(Path(unquote(parts.path)).stem or parts.hostname or "")
    return Corpus(name, without_password(url), (path,), encoding)


def _stdin(stream: BinaryIO | None, spool: Path) -> Path:
    # Python sets sys.stdin to None where the process was started without one.
    stream = stream or getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise AttnlmError("stdin is closed", "pipe a text into the command, or pass a file")
    return _spooled(stream, "stdin", spool)


def _from_path(source: str, encoding: str, spool: Path, on_event: OnEvent) -> Corpus:
    path = Path(source)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            files = _texts_in(path, encoding, on_event)
            name = (path if path.name not in ("", "..") else path.resolve()).name
        else:
            with path.open("rb") as stream:
                files = (path if stat.S_ISREG(mode) else _spooled(stream, source, spool),)
            name = path.stem
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise _not_found(source) from None
    except OSError as error:
        raise _unreadable(error.filename or source, error) from error
    # A name that is not valid Unicode could not be written to meta.json.
    readable = os.fsencode(source).decode(errors="replace")
    return Corpus(safe_name(name), readable, files, encoding)


def _spooled(stream: BinaryIO, shown: str, spool: Path) -> Path:
    """Copies what can't be read twice to a new file in `spool`."""
    try:
        with tempfile.NamedTemporaryFile(dir=spool, delete=False) as file:
            shutil.copyfileobj(stream, file)
    except OSError as error:
        raise AttnlmError(
            f"can't copy {shown} to {spool}: {error.strerror}",
            "save the text in a file first, and pass that",
        ) from error
    return Path(file.name)


def _unreadable(shown: object, error: OSError) -> AttnlmError:
    return AttnlmError(
        f"can't read {shown}: {error.strerror}", "check the path and its permissions"
    )


def _not_found(source: str) -> AttnlmError:
    """The error for a source that is nothing, with a near name as its hint where there is one."""
    folder = Path(source).parent
    near = {name: name for name in NAMES}
    try:
        for path in itertools.islice(folder.iterdir(), 1000):
            near.setdefault(path.name.lower(), str(path))
    except (OSError, ValueError):
        pass  # no folder, so no neighbours
    matches = difflib.get_close_matches(Path(source).name.lower(), near, n=1)
    hint = f"did you mean {near[matches[0]]!r}?" if matches else f"give {SOURCES}"
    return AttnlmError(f"no such file or corpus: {source!r}", hint)


# --- Folders --------------------------------------------------------------------------------------


def _texts_in(folder: Path, encoding: str, on_event: OnEvent) -> tuple[Path, ...]:
    """The text files in `folder`, in the order of their paths; Notes name some of the others."""
    texts: list[Path] = []
    others: list[Path] = []
    empty: list[Path] = []
    for path in _files_in(folder, frozenset()):
        start = _start_of(path, encoding)
        (others if start is None else texts if start else empty).append(path)
    count = len(texts) + len(others) + len(empty)
    if not texts:
        raise AttnlmError(
            f"no {encoding} text in {folder} ({count} files looked at, {len(empty)} of them empty)",
            "give a folder with text files in it, or their encoding with `--encoding`",
        )
    for paths, what in ((others, f"not {encoding} text"), (empty, "empty")):
        if paths:
            named = ", ".join(str(path.relative_to(folder)) for path in paths[:3])
            more = ", …" if len(paths) > 3 else ""
            left_out = f"left out {len(paths)} of {count} files, which are {what}"
            on_event(Note(f"{left_out}: {named}{more}"))
    return tuple(texts)


def _files_in(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """All but folders below `folder`, by name at each level; `above` are the folders it is in."""
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


def _start_of(path: Path, encoding: str) -> str | None:
    """The first characters of a text file; None where it is no text.

    A text decodes and holds no NUL, which wide encodings are full of.
    """
    if not path.is_file():
        return None
    with open_regular(path) as file:
        start = file.read(SNIFFED_BYTES)
    if b"\0" in start and not encoding.startswith(("utf-16", "utf-32")):
        return None
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
        return decoder.decode(start, final=len(start) < SNIFFED_BYTES).removeprefix("\ufeff")
    except UnicodeError:
        return None


# --- Bytes to characters --------------------------------------------------------------------------


def _text_encoding(name: str) -> str:
    """Python's own name for a text encoding; raises UsageError for any other."""
    try:
        b" ".decode(name, "replace")  # refuses codecs that are not from bytes to text
        codecs.getincrementaldecoder(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        raise UsageError(
            f"unknown text encoding: {name!r}",
            "give one that Python knows, such as utf-8, utf-16, latin-1 or shift_jis",
        ) from None


def _decoded(path: Path, encoding: str, newlines: str, shown: str) -> Iterator[str]:
    """A file's text, in strings of any length; `shown` is the file's name for the user."""
    decoder: codecs.IncrementalDecoder | io.IncrementalNewlineDecoder
    decoder = codecs.getincrementaldecoder(encoding)()
    if newlines == "unix":
        decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    read = 0  # bytes
    try:
        with open_regular(path) as file:
            start = file.read(UTF16_SNIFFED_BYTES)
            if encoding == "utf-8" and _is_full_of_nuls(start):
                raise AttnlmError(
                    f"{shown} looks like UTF-16: many of its bytes are NUL",
                    f"if it is a text, try `--encoding {_likely_encoding(start, encoding)}`",
                )
            file.seek(0)
            chunk = start
            while chunk:
                chunk = file.read(PIECE)
                read += len(chunk)
                yield decoder.decode(chunk, final=not chunk)
    except UnicodeError as error:
        offset = 0
        if isinstance(error, UnicodeDecodeError):
            # What the decoder was given ends where our reading does, and may start a chunk before.
            offset = read - len(error.object) + error.start
        raise AttnlmError(
            f"{shown} is not valid {encoding} at byte {offset}",
            f"name its encoding, perhaps `--encoding {_likely_encoding(start, encoding)}`",
        ) from error
    except OSError as error:
        raise _unreadable(shown, error) from error


def _is_full_of_nuls(start: bytes) -> bool:
    """Whether a quarter is NUL: text in UTF-16 often is, and would be valid, if odd, UTF-8."""
    return 4 * start.count(0) >= len(start) > 0


def _likely_encoding(start: bytes, refused: str) -> str:
    """What to try for a file with this start that is not in the encoding `refused`."""
    has_mark = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if has_mark and refused != "utf-16":
        return "utf-16"
    if refused == "utf-16" or _is_full_of_nuls(start):
        return "utf-16-le" if start[1::2].count(0) >= start[::2].count(0) else "utf-16-be"
    return "latin-1"
