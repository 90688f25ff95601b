"""A pipe or a device in place of a file is an error: nothing waits for it, or reads it for ever."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit import command, try_command

PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("checkpoints/foxes", "config.json"),
        ("checkpoints/foxes", "metrics.jsonl"),
        ("checkpoints/foxes", "tokenizer.json"),
        ("checkpoints/foxes", "best.safetensors"),
        ("checkpoints", "latest"),
        ("data/foxes", "meta.json"),
        ("data/foxes", "tokenizer.json"),
        ("data/foxes", "val.bin"),
        ("data", "latest"),
    ],
)
def test_pipes_and_devices_are_no_files_of_a_run(
    folder: str, file: str, kind: str, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "data", tmp_path / "data")
    runs = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints" / "transformer", runs / "foxes")
    shutil.copytree(trained / "checkpoints" / "bigram", runs / "bigram")
    (runs / "latest").write_text("foxes\n")
    command("sample", "--tokens", "1", cwd=tmp_path)
    (tmp_path / folder / file).unlink()
    PLACES[kind](tmp_path / folder / file)
    assert "bigram" in command("list", cwd=tmp_path).stdout
    for words in (["sample", "foxes", "--tokens", "1"], ["eval", "foxes"], ["list"]):
        with contextlib.chdir(tmp_path):
            done = try_command(words)
        assert done.fault() is None
        assert done.code == 0 or "it is not a regular file" in done.stderr
