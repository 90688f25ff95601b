"""docs/troubleshooting.md shows the errors that the program prints."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.kit import command, try_command

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SHOWN = re.findall(
    r"^```console\n\$ attnlm (.*)\n(error: .*)\n```$", PAGE.read_text("utf-8"), re.MULTILINE
)
"""Commands and their errors."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, data sets and a run, as its reader may have."""
    folder = tmp_path_factory.mktemp("reader")
    text = "It was a dark and stormy night; the rain fell in torrents.\n" * 60
    (folder / "my-novel.txt").write_text(text)
    (folder / "letters.txt").write_text(text)
    (folder / "latin.txt").write_bytes("Ein schönes Buch.\n".encode("latin-1"))
    (folder / "stories.parquet").write_bytes(b"PAR1")
    command("prepare", "letters.txt", "--tokenizer", "byte", cwd=folder)
    command("prepare", "letters.txt", "--name", "damaged-char", cwd=folder)
    ids = folder / "data" / "damaged-char" / "train.bin"
    ids.write_bytes(ids.read_bytes()[:-2] + b"\0\1")
    command("prepare", "my-novel.txt", cwd=folder)
    command("train", "--steps", "2", "--seed", "1", cwd=folder)
    return folder


@pytest.mark.parametrize(("command", "error"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_shown_error_is_what_the_command_prints(
    command: str, error: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.chdir(tmp_path if " in data yet" in error or "checkpoints yet" in error else folder)
    done = try_command(shlex.split(command))
    assert done.code in (1, 2)
    assert error in done.stderr.splitlines()


def test_enough_errors_are_shown() -> None:
    assert len(SHOWN) >= 15
