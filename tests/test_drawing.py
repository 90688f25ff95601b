"""Everything that draws: matplotlib in its worst surroundings keeps quiet, or is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_NO_TEMPORARY_FOLDER = "import tempfile; tempfile.tempdir = '/dev/null/temporary'\n"
_COMMANDS = """
import sys
from attnlm.cli import exits
from attnlm.cli.app import run_command
codes = []
for sys.argv in {arguments}:
    codes.append(exits.run(run_command))
sys.exit(max(codes))
"""
PAGE = ["report", "multi-head", "--output", "page.html"]
PICTURE = ["attend", "the dog", "--run", "multi-head", "--output", "picture.png"]


def draw(
    folder: Path, trained: Path, *commands: list[str], before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Draws into a folder, with no home that could be written."""
    runs = ["--checkpoint-dir", str(trained / "checkpoints")]
    arguments = [["attnlm", *command, *runs] for command in commands]
    homes = ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    return subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c"),
            before + _COMMANDS.format(arguments=arguments),
        ],
        cwd=folder,
        env={**os.environ, **dict.fromkeys(homes, "/dev/null/home")},
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize("command", [PAGE, PICTURE], ids=["page", "picture"])
def test_without_a_folder_for_its_cache_it_says_so(
    command: list[str], trained: Path, tmp_path: Path
) -> None:
    done = draw(tmp_path, trained, command, before=_NO_TEMPORARY_FOLDER)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "error: matplotlib finds no folder that it can write to",
        "hint: set MPLCONFIGDIR or TMPDIR to one",
    ]
    assert done.stderr.lower().count("matplotlib") == 1
    assert not list(tmp_path.iterdir())


def test_it_draws_in_silence_without_a_home_and_whatever_a_users_settings(
    trained: Path, tmp_path: Path
) -> None:
    drawn = []
    for settings in ("", "image.origin: lower\naxes.facecolor: red\nno such line\n"):
        (tmp_path / "matplotlibrc").write_text(settings)
        done = draw(tmp_path, trained, PAGE, PICTURE)
        assert done.returncode == 0 and "matplotlib" not in done.stderr.lower()
        drawn.append([(tmp_path / name).read_bytes() for name in ("page.html", "picture.png")])
    assert drawn[0] == drawn[1] and all(len(file) > 10_000 for file in drawn[0])


def test_settings_that_cannot_be_read_are_one_line(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"\xff\xfe")
    done = draw(tmp_path, trained, PICTURE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("error: matplotlib can't read its settings: ")
    assert done.stderr.splitlines()[-1].startswith("hint: ")
