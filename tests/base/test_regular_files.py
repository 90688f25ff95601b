"""A pipe or a device in place of a file is an error: nothing waits for it, or reads it for ever."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit import command, fails, try_command

NOT_REGULAR = "it is not a regular file"


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
def test_a_device_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").symlink_to("/dev/null")
    for words in ("prepare /dev/null", "prepare x.jsonl"):
        says = f"{words.split()[-1]}: it is a device"
        fails(*words.split(), cwd=tmp_path, code=1, says=says, hints="check the path")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("file", "make", "says"),
    [
        ("checkpoints/foxes/config.json", device, NOT_REGULAR),
        ("checkpoints/foxes/config.json", os.mkfifo, NOT_REGULAR),
        ("checkpoints/foxes/metrics.jsonl", os.mkfifo, NOT_REGULAR),
        ("checkpoints/foxes/tokenizer.json", os.mkfifo, NOT_REGULAR),
        ("checkpoints/foxes/best.safetensors", os.mkfifo, NOT_REGULAR),
        ("checkpoints/latest", os.mkfifo, ""),
        ("data/foxes/meta.json", os.mkfifo, "foxes is not a data set"),
        ("data/foxes/tokenizer.json", os.mkfifo, NOT_REGULAR),
        ("data/foxes/val.bin", os.mkfifo, "it has 0 bytes"),
        ("data/latest", device, ""),
    ],
)
def test_pipes_and_devices_are_no_files_of_a_run(
    file: str, make: Callable[[Path], object], says: str, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "data", tmp_path / "data")
    runs = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints" / "transformer", runs / "foxes")
    shutil.copytree(trained / "checkpoints" / "bigram", runs / "bigram")
    (runs / "latest").write_text("foxes\n")
    (tmp_path / file).unlink()
    make(tmp_path / file)
    assert "bigram" in command("list", cwd=tmp_path).stdout
    said = ""
    for words in ("list", "sample --tokens 1", "eval foxes --data foxes"):
        with contextlib.chdir(tmp_path):
            done = try_command(words.split())
        assert done.fault() is None
        said += done.stderr
    assert says in said
