"""Sources of text: a named corpus, files, folders, the web, the Hub, a pipe."""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import shutil
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import open_given, write_bytes
from attnlm.base.folders import KINDS, LATEST, default_name, is_safe_name
from attnlm.base.suggestions import similar_name, suggestion
from attnlm.text import hub_datasets
from attnlm.text.download import TIMEOUT, PinnedFile, fetch, fetch_cached, without_password
from attnlm.text.record_files import record_pieces
from attnlm.text.text_files import (
    COMPRESSED,
    RECORDS,
    Piece,
    bare_stem,
    files_in,
    keep_text_files,
    record_suffix,
    text_encoding,
    text_pieces,
    with_last_end,
)

TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DEFAULT_TIMEOUT = 3.0  # seconds of silence at each try, before `tales` replaces the default

_STDIN = "-"
NAMES = ("tinyshakespeare", "tales")
SOURCES = f"a file, a folder, a pattern, a URL, hf:NAME, {', '.join(NAMES)}, or - for stdin"


class TextFile(NamedTuple):
    """A file with text, called `shown` in messages. .jsonl and .parquet files ignore `encoding`."""

    path: Path
    shown: str
    encoding: str = "utf-8"


@dataclass(frozen=True)
class Corpus:
    """A text stored in files. The method `pieces` reads the text.

    `name` is valid as a file name on every system. `sources` are the sources that the user named.
    `floor_nats`, for `tales` only, maps the character offset at which each story begins to −ln p,
    where p is the probability of the text from this offset to the end.

    Each record of a .jsonl or .parquet file is a document, whose text is in `column`. If the user
    named several files or a folder, each file of another kind is a document too. `has_documents` is
    set if the text consists of documents; pieces then have their ends. `marks_ends` is set if an
    end-of-text id will follow each document; otherwise, each record ends with a newline.
    """

    name: str
    sources: tuple[str, ...]
    files: tuple[TextFile, ...]
    encoding: str = "utf-8"
    column: str = "text"
    has_documents: bool = False
    marks_ends: bool = False
    floor_nats: Mapping[int, float] | None = None

    @property
    def source(self) -> str:
        """Return the source that the user named, or a summary of several sources."""
        first, *others = self.sources
        return f"{_label(first)} and {len(others)} more" if others else first

    @property
    def shown(self) -> str:
        """Return the name of the source in messages."""
        return _label(self.source)

    @property
    def has_records_on_stdin(self) -> bool:
        """Return True if text came from stdin as records, False if it came as plain text."""
        return any(file.shown == _label(_STDIN) and record_suffix(file.path) for file in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Yield the text in pieces of 1 to 2¹⁸ characters, without byte order marks.

        Raises AttnlmError for a file that can't be read. The error names the byte offset of text
        that can't be decoded, or the line or row of an invalid record.
        """
        for path, shown, encoding in self.files:
            if record_suffix(path):
                pieces = record_pieces(path, self.column, shown, self.marks_ends)
            else:
                pieces = text_pieces(path, encoding, shown)
            try:
                yield from with_last_end(pieces) if self.has_documents else pieces
            except OSError as error:
                raise _unreadable_error(shown, error) from error


Source: TypeAlias = str | os.PathLike[str]


def get_corpus(
    source: Source | Iterable[Source] | None,
    *,
    encoding: str = "utf-8",
    column: str | None = None,
    marks_ends: bool | None = None,
    offline: bool = False,
    spool: Path,
    on_event: OnEvent = ignore,
    stdin: BinaryIO | None = None,
) -> Corpus:
    """Return the text that `source` names; `attnlm.prepare` describes the possible sources.

    A string may be a name such as "tales"; a path object is always a path. A source that can't be
    read twice, such as a pipe, is copied into the existing folder `spool`, which must outlive the
    corpus. If `column` is given, stdin and pipes without a suffix are read like .jsonl files.
    `encoding` applies to text from the user's files, the web and stdin. `marks_ends` says if an
    end-of-text id will follow each document; by default only if there are records. The environment
    variable `ATTNLM_TINYSHAKESPEARE_URL` names a mirror of Tiny Shakespeare with the same bytes.
    Raises AttnlmError for a text that is not available, UsageError for an unknown encoding or if no
    source is named.
    """
    encoding = text_encoding(encoding)
    suffix = "" if column is None else ".jsonl"  # of pipes

    def corpus_of(source: Source | None) -> Corpus:
        match source:
            case None | "tinyshakespeare" | "tales":
                corpus = _built_in_corpus(source, offline, spool, on_event)
            case "-":
                path = _copy_stream(stdin or sys.stdin.buffer, spool, suffix)
                corpus = _file_corpus("stdin", "-", path, encoding)
            case str() if source.startswith(hub_datasets.PREFIX):
                path = Path(tempfile.mkdtemp(dir=spool)) / "rows.jsonl.gz"
                hub_datasets.copy_texts(
                    source, column or "text", path, offline=offline, on_event=on_event
                )
                name = safe_name(Path(hub_datasets.parsed(source).path).name)
                corpus = _file_corpus(name, source, path)
            case str() if "://" in source:
                corpus = _web_corpus(source, encoding, offline, spool, on_event)
            case _:
                corpus = _path_corpus(os.fspath(source), encoding, spool, suffix, on_event)
        return replace(
            corpus,
            column=column or "text",
            marks_ends=corpus.has_documents and has_end_marks(corpus.files),
        )

    def has_end_marks(files: Sequence[TextFile]) -> bool:
        if marks_ends is None:
            return any(record_suffix(file.path) for file in files)
        return marks_ends

    if source is None or isinstance(source, str | os.PathLike):
        return corpus_of(source)
    corpora = list(map(corpus_of, source))
    if not corpora:
        raise UsageError("no source", f"name {SOURCES}")
    if len(corpora) == 1:
        return corpora[0]
    sources = tuple(corpus.source for corpus in corpora)
    for corpus in corpora:
        if not any(corpus.pieces()):
            on_event(Note(f"{corpus.shown} is empty"))
    files = tuple(file for corpus in corpora for file in corpus.files)
    return replace(
        corpora[0],
        name=f"{corpora[0].name}-and-{len(corpora) - 1}-more",
        sources=sources,
        files=files,
        encoding=encoding,
        has_documents=True,
        marks_ends=has_end_marks(files),
        floor_nats=None,
    )


def safe_name(text: str) -> str:
    """Return `text` as a file name for every system, which is never empty and never "latest"."""
    normal = unicodedata.normalize("NFC", text)
    characters = (c if c.isprintable() and c not in ' <>:"/\\|?*' else "-" for c in normal)
    # Most systems allow 255 bytes, of which the rest of a data set's name needs some.
    short = "".join(characters).strip("-.").encode()[:100].decode(errors="ignore").rstrip("-.")
    return short if is_safe_name(short) else f"text-{short}".rstrip("-")


# --- Where a text comes from ----------------------------------------------------------------------


def _file_corpus(name: str, source: str, path: Path, encoding: str = "utf-8") -> Corpus:
    file = TextFile(path, _label(source), encoding)
    return Corpus(name, (source,), (file,), encoding, has_documents=bool(record_suffix(path)))


def _built_in_corpus(source: str | None, offline: bool, spool: Path, on_event: OnEvent) -> Corpus:
    """Return a text by its name; for None, `tales` only if Tiny Shakespeare is not available."""
    if source != "tales":
        url = os.environ.get("ATTNLM_TINYSHAKESPEARE_URL") or TINY_SHAKESPEARE_URL
        name = "tinyshakespeare"
        timeout = TIMEOUT if source else DEFAULT_TIMEOUT
        file = PinnedFile(url, f"{name}.txt", TINY_SHAKESPEARE_SHA256)
        try:
            return _file_corpus(name, name, fetch_cached(file, spool, offline, on_event, timeout))
        except AttnlmError as error:
            if source:
                raise
            on_event(Note(f"{error.message}; using tales instead, which needs no network"))
    from attnlm.text import corpus_tales

    text, floor_nats = corpus_tales.generate_tales()
    path = spool / "tales.txt"
    write_bytes(path, text.encode())
    return replace(_file_corpus("tales", "tales", path), floor_nats=floor_nats)


def _web_corpus(url: str, encoding: str, offline: bool, spool: Path, on_event: OnEvent) -> Corpus:
    if offline:
        raise AttnlmError(
            f"{without_password(url)} needs the network, but `offline` is set",
            "use a file, or `attnlm prepare tales`",
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise AttnlmError(
            f"{without_password(url)} is not a valid address: {error}", "check the address"
        ) from error
    file = Path(unquote(parts.path))
    path = Path(tempfile.mkdtemp(dir=spool)) / f"download{_format_suffixes(file)}"
    fetch(url, path, on_event=on_event)
    name = safe_name(bare_stem(file) or parts.hostname or "")
    return _file_corpus(name, without_password(url), path, encoding)


def _format_suffixes(file: Path) -> str:
    """Return the suffixes that say how to read a file, such as ".jsonl.gz"."""
    return "".join(s for s in file.suffixes[-2:] if s.lower() in RECORDS + COMPRESSED)


def _path_corpus(source: str, encoding: str, spool: Path, suffix: str, on_event: OnEvent) -> Corpus:
    path = folder = Path(source)
    # A name that is not valid Unicode could not be written to meta.json.
    readable = os.fsencode(source).decode(errors="replace")
    try:
        if not source:
            raise FileNotFoundError
        if glob.has_magic(source) and not path.exists():
            matching = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 - it may be absolute
            files_found = (files_in(Path(place)) for place in matching)
            # A file may match by itself and in its folder.
            files = list(dict.fromkeys(itertools.chain.from_iterable(files_found)))
            fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
            folder = Path(*fixed)
        elif path.is_dir():
            files = list(files_in(path))
        else:
            file = path
            suffix = _format_suffixes(path) or suffix
            with open_given(path) as stream:
                if not path.is_file():
                    file = _copy_stream(stream, spool, suffix)
            return _file_corpus(safe_name(bare_stem(path)), readable, file, encoding)
        files = _without_own_folders(files, folder, on_event)
        texts = keep_text_files(files, str(path), encoding, on_event)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        from attnlm.text.tasks import TASKS  # tasks need this module

        names = [*NAMES, *TASKS]
        with contextlib.suppress(OSError, ValueError):  # no folder to list
            siblings = itertools.islice(path.parent.iterdir(), 1000)
            names += (str(file) for file in siblings if similar_name(path.name, [file.name], ""))
        hint = suggestion(source, names, f"use {SOURCES}")
        raise AttnlmError(f"no such file or corpus: {source!r}", hint) from None
    except OSError as error:
        raise _unreadable_error(error.filename or source, error) from error
    name = safe_name((folder if folder.name not in ("", "..") else folder.resolve()).name)
    text_files = tuple(TextFile(file, str(file), encoding) for file in texts)
    return Corpus(name, (readable,), text_files, encoding, has_documents=True)


def _without_own_folders(files: list[Path], folder: Path, on_event: OnEvent) -> list[Path]:
    """Return the files but those in folders of data sets or runs below `folder`."""

    @functools.cache
    def is_own(path: Path) -> bool:
        names = (default_name(path, kind) for kind in KINDS)
        return (path / LATEST).is_file() and any(names)

    def own_folders(file: Path) -> list[Path]:
        return [path for path in file.parents if folder in path.parents and is_own(path)]

    own = {file: found[0] for file in files if (found := own_folders(file))}
    if own:
        names = ", ".join(str(path) for path in dict.fromkeys(own.values()))
        on_event(Note(f"left out {names}, which attnlm made"))
    return [file for file in files if file not in own]


def _copy_stream(stream: BinaryIO, spool: Path, suffix: str) -> Path:
    """Copy a stream, which can't be read twice, to a new file in `spool` with this suffix."""
    with tempfile.NamedTemporaryFile(dir=spool, suffix=suffix, delete=False) as file:
        shutil.copyfileobj(stream, file)
    return Path(file.name)


# --- Messages -------------------------------------------------------------------------------------


def _label(source: str) -> str:
    return "stdin" if source == _STDIN else source


def _unreadable_error(shown: object, error: OSError) -> AttnlmError:
    """Return the error for a file that can't be read."""
    return AttnlmError(
        f"cannot read {shown}: {error.strerror}", "check the path and its permissions"
    )
