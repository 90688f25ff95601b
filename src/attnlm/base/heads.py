"""The library of heads: published ideas, each in a file of its own, which are used by name."""

from __future__ import annotations

import ast
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "heads"


@dataclass(frozen=True, kw_only=True)
class HeadEntry:
    """An entry of `list_heads`: a head of the library."""

    name: str
    idea: str
    source: str
    """the paper that defines it"""
    command: str
    """trains a model with it"""


def list_heads() -> list[HeadEntry]:
    """Return the heads of the library, sorted by name.

        ideas = {entry.name: entry.idea for entry in attnlm.list_heads()}

    Each is a file in src/attnlm/heads.
    """
    entries = []
    for name, path in _paths().items():
        about = ast.get_docstring(ast.parse(path.read_bytes())) or ""
        idea, source, command = about.split("\n\n")
        source = source.replace("\n", " ")
        entries.append(HeadEntry(name=name, idea=idea, source=source, command=command))
    return entries


@functools.cache
def _paths() -> dict[str, Path]:
    return {path.stem.replace("_", "-"): path for path in sorted(_FOLDER.glob("*.py"))}


def head_names() -> list[str]:
    """Return the names of the heads, such as linear-attention."""
    return list(_paths())


def head_code(name: str) -> str | None:
    """Return a head's file and class, as `FOLDER/linear_attention.py:LinearAttention`, or None."""
    path = _paths().get(name.replace("_", "-"))
    return None if path is None else f"{path}:{path.stem.title().replace('_', '')}"


@functools.cache
def is_head(sha256: str) -> bool:
    """Return True for the SHA-256 of a file of the library."""
    contents = (path.read_bytes() for path in _paths().values())
    return sha256 in {hashlib.sha256(content).hexdigest() for content in contents}
