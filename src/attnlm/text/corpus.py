"""Sources of text: a named corpus, files, folders, the web, the Hub, a pipe."""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import stat
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import unquote, urlsplit

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import open_given, write_bytes
from attnlm.base.folders import KINDS, LATEST, default_name, is_safe_name
from attnlm.base.suggestions import similar_name, suggestion
from attnlm.text import hub_datasets
from attnlm.text.download import TIMEOUT, PinnedFile, fetch, fetch_cached, without_password
from attnlm.text.record_files import record_values, require_text
from attnlm.text.tasks import TASKS
from attnlm.text.text_files import (
    COMPRESSED,
    END,
    RECORDS,
    OpenStream,
    bare_stem,
    files_in,
    open_decompressed,
    record_suffix,
    text_blocks,
    text_encoding,
)

TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DEFAULT_TIMEOUT = 3.0  # seconds of silence at each try, before `tales` replaces the default

_STDIN = "-"
NAMES = ("tinyshakespeare", "tales")
SOURCES = f"a file, a folder, a pattern, a URL, hf:NAME, {', '.join(NAMES)}, or - for stdin"


@dataclass(frozen=True)
class TextFile:
    """A file, a stream that is read once, or a data set of the Hub.

    `shown` is its name in messages. The suffix of `path` says its format; `stream` opens a pipe in
    its place. Records ignore `encoding`. A file that is `optional`, as it was found in a folder, is
    left out if it is no text; a `plain` one is text whatever its suffix. `rows` yields the records
    of a data set of the Hub.
    """

    path: Path
    shown: str
    encoding: str = "utf-8"
    stream: OpenStream | None = None
    optional: bool = False
    plain: bool = False
    rows: Callable[[Sequence[str]], Iterator[tuple[str, list[Any]]]] | None = None

    @property
    def is_records(self) -> bool:
        """Return True if the file holds records, each with columns."""
        return self.rows is not None or (not self.plain and bool(record_suffix(self.path)))

    def records(self, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
        """Yield the values of each record in these columns, after the name of its place."""
        if not self.is_records:
            raise AttnlmError(
                f"{self.shown} has no columns", f"`prompt_column` needs one of {', '.join(RECORDS)}"
            )
        if self.rows is not None:
            return self.rows(columns)
        return record_values(self.path, columns, self.shown, self.stream)


@dataclass(frozen=True)
class Corpus:
    """The files of a text.

    `name` is valid as a file name on every system. `sources` are the sources that the user named.
    `floor_nats`, for `tales` only, maps the character offset at which each story begins to −ln p,
    where p is the probability of the text from this offset to the end.

    Each record is a document, whose text is in `column`. If the user named several files or a
    folder, each file of another kind is a document too. `has_documents` is set if the text consists
    of documents, which then end with END. `marks_ends` is set if an end-of-text id will follow each
    document; otherwise, each record ends with a newline.
    """

    name: str
    sources: tuple[str, ...]
    files: tuple[TextFile, ...]
    encoding: str = "utf-8"
    column: str = "text"
    has_documents: bool = False
    marks_ends: bool = False
    max_bytes: int | None = None
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
        return any(file.shown == _label(_STDIN) and file.is_records for file in self.files)

    def texts(self, file: TextFile) -> Iterator[str]:
        """Yield the text of one of the files: its records, or blocks of it.

        Raises AttnlmError if it can't be read. The error names the byte offset of text that can't
        be decoded, or the line or row of an invalid record.
        """
        try:
            if file.is_records:
                for where, (value,) in file.records([self.column]):
                    if text := require_text(value, self.column, where):
                        is_open = not self.marks_ends and not text.endswith("\n")
                        yield text + "\n" * is_open + END
            else:
                with open_decompressed(file.path, file.shown, file.stream) as opened:
                    yield from text_blocks(opened, file.encoding, file.shown)
        except OSError as error:
            raise _unreadable_error(file.shown, error) from error


Source: TypeAlias = str | os.PathLike[str]


def get_corpus(
    sources: Sequence[Source | None],
    *,
    encoding: str = "utf-8",
    column: str | None = None,
    marks_ends: bool | None = None,
    max_bytes: int | None = None,
    offline: bool = False,
    spool: Path,
    on_event: OnEvent = ignore,
    stdin: BinaryIO | None = None,
) -> Corpus:
    """Return the text of one source or several; `attnlm.prepare` describes the possible ones.

    A string may be a name such as "tales"; a path object is always a path. Downloads go to the
    folder `spool`, which must outlive the corpus; stdin and pipes can be read once. If `column` is
    given, stdin and pipes without a suffix are read like .jsonl or .csv files. `encoding` applies
    to text from the user's files, the web and stdin. `marks_ends` says if an end-of-text id will
    follow each document; by default only if there are records. The environment variable
    `ATTNLM_TINYSHAKESPEARE_URL` names a mirror of Tiny Shakespeare with the same bytes. Raises
    AttnlmError for a text that is not available, UsageError for an unknown encoding.
    """
    encoding = text_encoding(encoding)
    suffix = "" if column is None else ".jsonl"  # of pipes

    def corpus_of(source: Source | None) -> Corpus:
        match source:
            case None | "tinyshakespeare" | "tales":
                return _built_in_corpus(source, offline, spool, on_event)
            case "-":
                read = functools.partial(contextlib.nullcontext, stdin or sys.stdin.buffer)
                return _corpus("stdin", "-", Path(f"stdin{suffix}"), encoding, stream=read)
            case str() if source.startswith(hub_datasets.PREFIX):
                rows = functools.partial(hub_datasets.records, source, offline=offline)
                path = Path(hub_datasets.parsed(source).path)
                return _corpus(safe_name(path.name), source, path, rows=rows)
            case str() if "://" in source:
                return _web_corpus(source, encoding, offline, spool, max_bytes, on_event)
            case _:
                return _path_corpus(os.fspath(source), encoding, suffix, on_event)

    corpora = list(map(corpus_of, sources))
    files = tuple(file for corpus in corpora for file in corpus.files)
    corpus = replace(corpora[0], files=files, column=column or "text", max_bytes=max_bytes)
    if len(corpora) > 1:
        corpus = replace(
            corpus,
            name=f"{corpus.name}-and-{len(corpora) - 1}-more",
            sources=tuple(corpus.source for corpus in corpora),
            encoding=encoding,
            has_documents=True,
            floor_nats=None,
        )
    if marks_ends is None:
        marks_ends = any(file.is_records for file in files)
    return replace(corpus, marks_ends=corpus.has_documents and marks_ends)


def safe_name(text: str) -> str:
    """Return `text` as a file name for every system, which is never empty and never "latest"."""
    normal = unicodedata.normalize("NFC", text)
    characters = (c if c.isprintable() and c not in ' <>:"/\\|?*' else "-" for c in normal)
    # Most systems allow 255 bytes, of which the rest of a data set's name needs some.
    short = "".join(characters).strip("-.").encode()[:100].decode(errors="ignore").rstrip("-.")
    return short if is_safe_name(short) else f"text-{short}".rstrip("-")


# --- Where a text comes from ----------------------------------------------------------------------


def _corpus(name: str, source: str, path: Path, encoding: str = "utf-8", **more: Any) -> Corpus:
    """Return the corpus of one file; `more` are fields of TextFile."""
    file = TextFile(path, _label(source), encoding, **more)
    return Corpus(name, (source,), (file,), encoding, has_documents=file.is_records)


def _built_in_corpus(source: str | None, offline: bool, spool: Path, on_event: OnEvent) -> Corpus:
    """Return a text by its name; for None, `tales` only if Tiny Shakespeare is not available."""
    if source != "tales":
        url = os.environ.get("ATTNLM_TINYSHAKESPEARE_URL") or TINY_SHAKESPEARE_URL
        name = "tinyshakespeare"
        timeout = TIMEOUT if source else DEFAULT_TIMEOUT
        file = PinnedFile(url, f"{name}.txt", TINY_SHAKESPEARE_SHA256)
        try:
            return _corpus(name, name, fetch_cached(file, spool, offline, on_event, timeout))
        except AttnlmError as error:
            if source:
                raise
            on_event(Note(f"{error.message}; using tales instead, which needs no network"))
    from attnlm.text import corpus_tales

    text, floor_nats = corpus_tales.generate_tales()
    path = spool / "tales.txt"
    write_bytes(path, text.encode())
    return replace(_corpus("tales", "tales", path), floor_nats=floor_nats)


def _web_corpus(
    url: str,
    encoding: str,
    offline: bool,
    spool: Path,
    max_bytes: int | None,
    on_event: OnEvent,
) -> Corpus:
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
    fetch(url, path, max_bytes=max_bytes, on_event=on_event)
    name = safe_name(bare_stem(file) or parts.hostname or "")
    return _corpus(name, without_password(url), path, encoding)


def _format_suffixes(file: Path) -> str:
    """Return the suffixes that say how to read a file, such as ".jsonl.gz"."""
    return "".join(s for s in file.suffixes[-2:] if s.lower() in RECORDS + COMPRESSED)


def _path_corpus(source: str, encoding: str, suffix: str, on_event: OnEvent) -> Corpus:
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
            name = safe_name(bare_stem(path))
            if stat.S_ISREG(path.stat().st_mode):
                open_given(path).close()  # raises its errors
                return _corpus(name, readable, path, encoding)
            read = functools.partial(open_given, path)
            named = Path(name + (_format_suffixes(path) or suffix))
            return _corpus(name, readable, named, encoding, stream=read)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        names = [*NAMES, *TASKS]
        with contextlib.suppress(OSError, ValueError):  # no folder to list
            siblings = itertools.islice(path.parent.iterdir(), 1000)
            names += (str(file) for file in siblings if similar_name(path.name, [file.name], ""))
        hint = suggestion(source, names, f"use {SOURCES}")
        raise AttnlmError(f"no such file or corpus: {source!r}", hint) from None
    except OSError as error:
        raise _unreadable_error(error.filename or source, error) from error
    files = _without_own_folders(files, folder, on_event)
    if not files:
        raise AttnlmError(f"no files found: {source}", "name a folder or a pattern of text files")
    name = safe_name((folder if folder.name not in ("", "..") else folder.resolve()).name)
    # A folder's package.json or table is a text among others, unless a column is named.
    text_files = tuple(
        TextFile(
            file,
            str(file),
            encoding,
            optional=True,
            plain=not suffix and record_suffix(file) in (".json", ".csv"),
        )
        for file in files
    )
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


# --- Messages -------------------------------------------------------------------------------------


def _label(source: str) -> str:
    return "stdin" if source == _STDIN else source


def _unreadable_error(shown: object, error: OSError) -> AttnlmError:
    """Return the error for a file that can't be read."""
    return AttnlmError(
        f"cannot read {shown}: {error.strerror}", "check the path and its permissions"
    )
