"""The text files of a folder or a pattern, in the order of their paths."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.text.compressed import is_compressed
from attnlm.text.encodings import start_of
from attnlm.text.records import kind_of


def texts_in(folder: Path, encoding: str, on_event: OnEvent) -> tuple[Path, ...]:
    """The text files in `folder`, in the order of their paths; Notes name some of the others."""
    return _texts_among(_files_in(folder, frozenset()), str(folder), encoding, on_event)


def texts_matching(pattern: str, encoding: str, on_event: OnEvent) -> tuple[Path, ...]:
    """The text files that match a pattern with *, ?, [] or **, and those in folders that do."""
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


def bare_stem(path: Path) -> str:
    """A file's name without what says how it is stored: "cats" of cats.jsonl.gz."""
    return Path(path.stem).stem if is_compressed(path) else path.stem


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
            named = ", ".join(_relative(path, where) for path in left[:3])
            more = ", …" if len(left) > 3 else ""
            left_out = f"left out {len(left)} of {count} files, which are {what}"
            on_event(Note(f"{left_out}: {named}{more}"))
    return tuple(texts)


def _start_of(path: Path, encoding: str) -> str | None:
    """As `start_of`; records are what their file's name says, valid or not."""
    if kind_of(path) and path.is_file():
        return "records" if path.stat().st_size else ""
    return start_of(path, encoding)


def _relative(path: Path, where: str) -> str:
    return str(path.relative_to(where) if Path(where) in path.parents else path)


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
