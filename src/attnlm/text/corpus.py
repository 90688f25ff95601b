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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import open_given, write_bytes
from attnlm.base.folders import KINDS, LATEST, default_name, is_safe_name
from attnlm.base.suggestions import suggestion
from attnlm.text.download import TIMEOUT, fetch, fetch_cached, without_password
from attnlm.text.record_files import (
    HUB_PREFIX,
    Questions,
    example_text,
    hub_parts,
    hub_records,
    record_values,
    require_text,
)
from attnlm.text.tasks import TASKS
from attnlm.text.text_files import END, TextFile, bare_name, files_in, record_suffix, text_encoding

TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DEFAULT_TIMEOUT = 3.0  # seconds of silence at each try, before `tales` replaces the default

NAMES = ("tinyshakespeare", "tales")
SOURCES = f"a file, a folder, a pattern, a URL, hf:NAME, {', '.join(NAMES)}, or - for stdin"

Source: TypeAlias = str | os.PathLike[str]


def summary(sources: Sequence[str]) -> str:
    """Return the source that the user named, or a summary of several sources."""
    first, *others = sources
    first = "stdin" if others and first == "-" else first
    return f"{first} and {len(others)} more" if others else first


@dataclass(frozen=True)
class Corpus:
    """The files of a text.

    `name` is valid as a file name on every system. `sources` are the sources that the user named.
    `floor_nats`, for `tales` only, maps the character offset at which each story begins to −ln p,
    where p is the probability of the text from this offset to the end.

    Each record is a document, whose text is in `columns`. If `has_documents`, each file of another
    kind is a document too, and documents end with END. `marks_ends` is set if an end-of-text id
    will follow each document; otherwise, each record ends with a newline. If `questions` is set,
    each document is a question with its answer, or a conversation, with marks.
    """

    name: str
    sources: tuple[str, ...]
    files: tuple[TextFile, ...]
    columns: Sequence[str] = ()
    questions: Questions | None = None
    marks_ends: bool = False
    max_bytes: int | None = None
    floor_nats: Mapping[int, float] | None = None

    @property
    def shown(self) -> str:
        """Return the name of the source in messages."""
        return "stdin" if self.sources == ("-",) else summary(self.sources)

    @property
    def has_documents(self) -> bool:
        """Return True for records, a folder, a pattern, or several files."""
        first, *others = self.files
        return bool(others) or first.optional or first.is_records

    def texts(self, file: TextFile) -> Iterator[str]:
        """Yield the text of one of the files: its records, each with END, or blocks of it.

        Raises AttnlmError if it can't be read. The error names the byte offset of text that can't
        be decoded, or the line or row of an invalid record.
        """
        try:
            if file.examples:
                yield from (text + END for text in file.examples)
            elif not file.is_records and self.questions is None:
                yield from file.blocks()
            else:
                for where, values in record_values(file, self.columns):
                    if self.questions is not None:
                        yield example_text(values, self.columns, where) + END
                    elif text := require_text(values[0], self.columns[0], where):
                        is_open = not self.marks_ends and not text.endswith("\n")
                        yield text + "\n" * is_open + END
        except OSError as error:
            raise _unreadable_error(file.shown, error) from error


def get_corpus(
    sources: Sequence[Source | None],
    *,
    encoding: str = "utf-8",
    columns: Sequence[str] = (),
    questions: Questions | None = None,
    marks_ends: bool | None = None,
    max_bytes: int | None = None,
    offline: bool = False,
    spool: Path,
    on_event: OnEvent = ignore,
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
    pipe_format = ".jsonl" if columns else ""

    def corpus_of(source: Source | None) -> Corpus:
        match source:
            case None | "tinyshakespeare" | "tales":
                return _built_in_corpus(source, offline, spool, on_event)
            case "-":
                stream = contextlib.nullcontext(sys.stdin.buffer)
                file = TextFile(Path("stdin"), "stdin", encoding, pipe_format, lambda: stream)
            case str() if source.startswith(HUB_PREFIX):
                rows = functools.partial(hub_records, source, offline=offline)
                path = Path(hub_parts(source)["path"])
                file = TextFile(path, source, rows=rows)
            case str() if "://" in source:
                if offline:
                    raise AttnlmError(
                        f"{without_password(source)} needs the network, but `offline` is set",
                        "use a file, or `attnlm prepare tales`",
                    )
                file = _downloaded(source, encoding, spool, max_bytes, on_event)
            case _:
                return _path_corpus(os.fspath(source), encoding, pipe_format, on_event)
        return _of_file(file, str(source) if source == "-" else file.shown)

    corpora = list(map(corpus_of, sources))
    files = tuple(file for corpus in corpora for file in corpus.files)
    corpus = replace(
        corpora[0],
        files=files,
        columns=columns or ("text",),
        questions=questions,
        max_bytes=max_bytes,
    )
    if len(corpora) > 1:
        corpus = replace(
            corpus,
            name=f"{corpus.name}-and-{len(corpora) - 1}-more",
            sources=tuple(corpus.sources[0] for corpus in corpora),
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


def _of_file(file: TextFile, source: str) -> Corpus:
    name = safe_name(bare_name(file.path).stem)
    return Corpus(name, (source,), (file,))


def _built_in_corpus(source: str | None, offline: bool, spool: Path, on_event: OnEvent) -> Corpus:
    """Return a text by its name; for None, `tales` only if Tiny Shakespeare is not available."""
    if source != "tales":
        url = os.environ.get("ATTNLM_TINYSHAKESPEARE_URL") or TINY_SHAKESPEARE_URL
        name = "tinyshakespeare"
        try:
            path = fetch_cached(
                url,
                f"{name}.txt",
                TINY_SHAKESPEARE_SHA256,
                spool,
                offline=offline,
                timeout=TIMEOUT if source else DEFAULT_TIMEOUT,
                on_event=on_event,
            )
            return _of_file(TextFile(path, name), name)
        except AttnlmError as error:
            if source:
                raise
            on_event(Note(f"{error.message}; using tales instead, which needs no network"))
    from attnlm.text import corpus_tales

    text, floor_nats = corpus_tales.generate_tales()
    path = spool / "tales.txt"
    write_bytes(path, text.encode())
    return replace(_of_file(TextFile(path, "tales"), "tales"), floor_nats=floor_nats)


def _downloaded(
    url: str, encoding: str, spool: Path, max_bytes: int | None, on_event: OnEvent
) -> TextFile:
    shown = without_password(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise AttnlmError(
            f"{shown} is not a valid address: {error}", "check the address"
        ) from error
    name = Path(unquote(parts.path)).name or f"{parts.hostname}.html"
    path = Path(tempfile.mkdtemp(dir=spool)) / safe_name(name)
    fetch(url, path, max_bytes=max_bytes, on_event=on_event)
    return TextFile(path, shown, encoding, record_suffix(path))


def _path_corpus(source: str, encoding: str, pipe_format: str, on_event: OnEvent) -> Corpus:
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
            folder = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        elif path.is_dir():
            files = list(files_in(path))
        else:
            stream, format = None, record_suffix(path)
            if stat.S_ISREG(path.stat().st_mode):
                open_given(path).close()  # raises its errors
            else:
                stream, format = functools.partial(open_given, path), format or pipe_format
            return _of_file(TextFile(path, readable, encoding, format, stream), readable)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        names = [*NAMES, *TASKS]
        with contextlib.suppress(OSError, ValueError):  # no folder to list
            siblings = itertools.islice(path.parent.iterdir(), 1000)
            names += (str(file) for file in siblings if suggestion(path.name, [file.name], ""))
        hint = suggestion(source, names, f"use {SOURCES}")
        raise AttnlmError(f"no such file or corpus: {source!r}", hint) from None
    except OSError as error:
        raise _unreadable_error(error.filename or source, error) from error
    files = _without_own_folders(files, folder, on_event)
    if not files:
        raise AttnlmError(f"no files found: {source}", "name a folder or a pattern of text files")
    name = safe_name((folder if folder.name not in ("", "..") else folder.resolve()).name)
    # A folder's package.json or table is a text among others, unless a column is named.
    texts = () if pipe_format else (".json", ".csv")
    formats = ("" if (suffix := record_suffix(file)) in texts else suffix for file in files)
    text_files = tuple(
        TextFile(file, str(file), encoding, format, optional=True)
        for file, format in zip(files, formats, strict=True)
    )
    return Corpus(name, (readable,), text_files)


def _without_own_folders(files: list[Path], folder: Path, on_event: OnEvent) -> list[Path]:
    """Return the files but those in folders of data sets or runs below `folder`."""

    parents = {path for file in files for path in file.parents if folder in path.parents}
    with_latest = (path for path in sorted(parents) if (path / LATEST).is_file())
    own = [path for path in with_latest if any(default_name(path, kind) for kind in KINDS)]
    if own:
        on_event(Note(f"left out {', '.join(map(str, own))}, which attnlm made"))
    return [file for file in files if not set(own) & set(file.parents)]


def _unreadable_error(shown: object, error: OSError) -> AttnlmError:
    """Return the error for a file that can't be read."""
    return AttnlmError(
        f"cannot read {shown}: {error.strerror}", "check the path and its permissions"
    )
