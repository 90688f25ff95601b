"""docs/own-part.md: its files, commands and programs run, and print what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

import attnlm
from tests.kit import command, try_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-part.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
FEWER = {"--steps": "1", "--seeds": "1", "--tokens": "9"}


@pytest.fixture(scope="module")
def folder(few_tales: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page and the examples."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "examples", folder / "examples")
    named = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in named] == ["mine.py", "leak.py"]
    for name, content in named:
        (folder / name).write_text(content)
    return folder


def fewer(words: list[str]) -> list[str]:
    """Return a command with fewer steps and seeds."""
    return [FEWER.get(option, word) for option, word in zip(["", *words], words, strict=False)]


def run_commands(page: str, folder: Path) -> int:
    """Run the commands of a page, which must print the lines that it shows; return their number."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    shown = [one for block in blocks for one in block.split("$ attnlm ")[1:]]
    for line, *output in (one.rstrip().splitlines() for one in shown):
        code = 1 if "leak.py" in line else 0
        done = command(*fewer(shlex.split(line)), cwd=folder, code=code)
        assert [words for words in output if words not in done.stdout.splitlines()] == []
    return len(shown)


def test_the_first_part_runs(folder: Path) -> None:
    assert run_commands(PAGE.split("\n## ")[1], folder) == 8


@pytest.mark.slow
def test_all_commands_run_and_print_what_the_page_shows(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    assert run_commands(PAGE, folder) > 12


def test_the_programs_run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = [content for language, content in BLOCKS if "import attnlm" in content]
    assert len(programs) == 2
    monkeypatch.chdir(folder)
    attnlm.prepare("tales")
    for number, program in enumerate(programs):
        program = re.sub(r"steps=\d+", "steps=3", program).replace("range(200)", "range(3)")
        path = tmp_path / f"program_{number}.py"  # the source of its classes is read from there
        path.write_text(program.replace("100_000", "1000"))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": f"program_{number}"})
        assert said.getvalue()


def test_uses_that_the_page_rules_out_are_refused(folder: Path) -> None:
    command("train", "--scores", "mine.py:Temperature", "--steps", 2, "--name", "no", cwd=folder)
    for words in (
        ["export", "no", "page.html", "--to", "html"],
        ["export", "no", "out", "--to", "hf"],
        ["trace", "To be", "no"],
    ):
        with contextlib.chdir(folder):
            done = try_command(words)
        assert done.code in (1, 2) and "it computes mine.py:Temperature" in done.stderr, words


def test_the_page_names_every_example() -> None:
    paths = sorted((ROOT / "examples").glob("*.py"))
    assert paths and [path for path in paths if f"examples/{path.name}" not in PAGE] == []
