"""Documents: their commands with the lines that they show below each, and the files in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.kit import with_options

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shown:
    """A command of attnlm in a document, and the lines that it is shown to print."""

    words: list[str]
    output: list[str]


def text_of(page: str) -> str:
    """The text of a page, named from the root of the project."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(text: str, language: str) -> list[str]:
    """The contents of the blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def shown_in(text: str) -> list[Shown]:
    """The commands in the console blocks of a text, without what a pipe adds to them."""
    return [
        command
        for block in blocks_of(text, "console")
        for lines in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)
        for command in _commands_in(lines)
    ]


def commands_in(text: str) -> list[list[str]]:
    """The commands that are lines of a text, as in a docstring or a script."""
    return [command.words for line in text.splitlines() for command in _commands_in(line)]


def _commands_in(lines: str) -> list[Shown]:
    line, _, output = lines.partition("\n")
    if found := re.match(r"(?:cat .* \| )?attnlm ([^|]*)", line):
        return [Shown(shlex.split(found[1], comments=True), output.splitlines())]
    return []


def write_files(text: str, folder: Path) -> None:
    """Write the Python files that a page shows below their names."""
    named = re.findall(r"`(\w+\.py)`[^\n]*\n\n```py(?:thon)?\n(.*?)^```$", text, re.DOTALL | re.M)
    for name, content in named:
        (folder / name).write_text(content)


def shortened(words: list[str]) -> list[str]:
    """The same command, with options that save time."""
    options = {"prepare": ["--offline"], "sample": ["--tokens", "5"]}.get(words[0], [])
    if words[0] in ("train", "ladder") and "--resume" not in words:
        options += ["--budget", "0.1s"] if "--budget" in words else ["--steps", "1"]
    if "--resume" in words and "--steps" in words:
        options += ["--steps", str(int(words[words.index("--steps") + 1]) // 100)]
    if words[0] == "exam" and "--resume" not in words:
        options += ["--tasks", "copy", "--seeds", "1"]
    if "--seeds" in words:
        options += ["--seeds", "2"]
    if "--tune" in words:  # five trainings for each rung
        options += ["--rungs", "bigram"]
    if words[0] == "train" and not {"--resume", "--budget", "--processes"} & set(words):
        options += ["--batch-size", "1" if "--dry-run" in words else "4"]
    return with_options(words, *options)
