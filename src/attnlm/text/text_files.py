"""The text files of a folder, in the order of their paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.text.encodings import start_of


def texts_in(folder: Path, encoding: str, on_event: OnEvent) -> tuple[Path, ...]:
    """The text files in `folder`, in the order of their paths; Notes name some of the others."""
    texts: list[Path] = []
    others: list[Path] = []
    empty: list[Path] = []
    for path in _files_in(folder, frozenset()):
        start = start_of(path, encoding)
        (others if start is None else texts if start else empty).append(path)
    count = len(texts) + len(others) + len(empty)
    if not texts:
        raise AttnlmError(
            f"no {encoding} text in {folder} ({count} files looked at, {len(empty)} of them empty)",
            "give a folder with text files in it, or name their `encoding`",
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
