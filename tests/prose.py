"""Find habits that make English hard to read: `python -m tests.prose [FILE or FOLDER …]`.

A habit is not an error, and a few places are right. `tests/project/test_prose.py` has the budgets.
Markdown counts outside of code; Python, C and JavaScript count with their docstrings and comments,
and with each identifier once, whose words `_` or capitals divide.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
GENERATED = ("cli.md", "library.md")
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED),
]
SOURCE = [ROOT / "src"]
PAGES = [ROOT / "src" / "attnlm" / "see" / "pages"]
TEXTS, NAMES = ("prose", "docstring", "comment"), ("name", "test name")
TESTS = [ROOT / "tests", ROOT / "benchmarks"]

HABITS = {
    name: (re.compile(pattern, re.VERBOSE), remedy)
    for name, pattern, remedy in (
        (
            "docstring fragment",
            r"\A(Of|As|At|By|From|In|On|To|With|Without|Where|Whether|How|What|Who|So|Also"
            r"|None|All|It|Its|They|Their|Those|That|This)\b",
            "open with a verb or a noun: Return …, Read …, Raised when …",
        ),
        (
            "test name fragment",
            r"\Atest\ (what|it|its|they|their|those|of|as|in|on|at|by|where|whether|how|without)\b",
            "name the subject and what it does",
        ),
        ("none where", r"\b[Nn]one\ (where|of)\b", "'or None if …'"),
        (
            "unnamed thing",
            r"\b(that|those)\ of\b | \bof\ (it|them|those|these)\b",
            "name the thing",
        ),
        ("is no", r"\b(is|are|was|were|be)\ no\b(?!\ (longer|more))", "'is not a', 'has no'"),
        (
            "inverted order",
            r"(?<=[.:;]\ )(Not|Nor|Only|Never|Else|Of\ \w+|To\ \w+)\ (\w+\ ){0,2}"
            r"(is|are|was|were|does|do|has|have|can|may|must|will)\b",
            "subject, verb, object",
        ),
        (
            "literary word",
            r"\b(meanwhile|hitherto|thereby|therein|anew|asunder|beside|besides|whoever|whatever"
            r"|ere|lest|nought|hence|thus|at\ hand|at\ once|by\ heart|in\ the\ end"
            r"|in\ turn|far\ as|so\ (many|much))\b",
            "use the usual word",
        ),
        (
            "agent left out",
            r"\b(is|are|was|were)\ (told|said|asked|taken|meant|wanted|looked\ (at|for|up))\b",
            "say who or what does it",
        ),
        (
            "own term",
            r"\b(plain\ forms?|way\ back|the\ crew|equal\ shares|main\ process|side\ by\ side"
            r"|adds?\ up|added\ up|learns?\ by\ heart|passes\ over\ the\ (text|data))\b",
            "use the field's: reference implementation, backward pass, rank 0, sum, epochs, …",
        ),
        ("long sentence", r"([^\s.:;!?|]+\s+){40}", "make two of it"),
    )
}
"""Habits by name: a pattern, and what to write instead."""


class Site(NamedTuple):
    """One occurrence of a habit."""

    path: Path
    line: int
    habit: str
    text: str


def places_and_words(
    paths: Iterable[Path], kinds: Collection[str] = TEXTS
) -> tuple[list[Site], int]:
    """Return all places where a habit occurs below `paths`, and the number of words read."""
    places, words = [], 0
    for path in _files(paths):
        for line, kind, text in _texts(path):
            if kind not in kinds:
                continue
            words += len(text.split())
            for habit, (pattern, _) in HABITS.items():
                if habit.endswith("fragment") and not habit.startswith(kind):
                    continue
                for found in pattern.finditer(text):
                    around = text[max(0, found.start() - 30) : found.end() + 30]
                    places.append(Site(path, line, habit, around))
    return places, words


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in below if file.suffix in (".md", ".py", ".c", ".h", ".js"))


@functools.cache
def _texts(path: Path) -> Sequence[tuple[int, str, str]]:
    """Return paragraphs and identifiers of a file, each on one line, with first line and kind."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        parts = [(1, "prose", _without_code(source))]
    elif path.suffix == ".py":
        parts = [*_docstrings(source), *_comments_of_python(source)]
    else:
        parts = [
            (source.count("\n", 0, found.start()) + 1, "comment", found[1] or found[2])
            for found in re.finditer(
                r"/\*(.*?)\*/|(?:^|\s)//+ ([^\n]*)", source, re.DOTALL | re.MULTILINE
            )
        ]
    paragraphs = [
        (line, kind, paragraph)
        for first, kind, text in parts
        for line, paragraph in _paragraphs(text, first)
    ]
    return paragraphs if path.suffix == ".md" else [*paragraphs, *_names(source)]


def _docstrings(source: str) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                # Indented lines are examples.
                yield node.body[0].lineno, "docstring", re.sub(r"(?m)^    .*", "", docstring)


def _comments_of_python(source: str) -> Iterator[tuple[int, str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string.lstrip("# ")


def _names(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each identifier of several words once, words divided by spaces."""
    known = set()
    for found in re.finditer(r"\b_*([A-Za-z]\w+)", source):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", found[1]).strip().lower()
        if " " in words and words not in known:
            known.add(words)
            kind = "test name" if words.startswith("test ") else "name"
            yield source.count("\n", 0, found.start()) + 1, kind, words


def _without_code(source: str) -> str:
    """Replace code of Markdown: blocks by empty lines, and code within a line by X."""
    blocks = r"(?ms)^ *```.*?^ *```$|^<!--.*?-->$|^    .*?$"
    source = re.sub(blocks, lambda found: "\n" * found[0].count("\n"), source)
    return re.sub(r"`[^`]+`", "X", source)


def _paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, items of lists and rows of tables of a text."""
    start = 0
    for end in [found.start() for found in re.finditer(r"\n(?=\s*(\n|[-*|#]|\d\.))", text)] + [
        None
    ]:
        paragraph = text[start:end]
        if paragraph.strip():
            leading = len(paragraph) - len(paragraph.lstrip("\n"))
            line = first + text.count("\n", 0, start + leading)
            yield line, " ".join(paragraph.split())
        start = end or 0


def main() -> None:
    """Print every place, then the habits per 1,000 words."""
    paths = [Path(name) for name in sys.argv[1:]] or [*DOCUMENTS, *SOURCE]
    places, words = places_and_words(paths, (*TEXTS, *NAMES))
    for place in places:
        remedy = HABITS[place.habit][1]
        print(f"{place.path}:{place.line}: {place.habit} ({remedy}): …{place.text}…")
    print(f"{len(places)} in {words:,} words: {1000 * len(places) / max(1, words):.1f} per 1,000")


if __name__ == "__main__":
    main()
