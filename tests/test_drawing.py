"""Everything that draws: matplotlib in its worst surroundings keeps quiet, or is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_NO_TEMPORARY_FOLDER = "import tempfile; tempfile.tempdir = '/dev/null/temporary'\n"
_COMMAND = "import sys; from attnlm.cli import exits; from attnlm.cli.app import run_command\n"

COMMANDS = {
    ".html": ["report", "multi-head", "--output"],
    ".png": ["attend", "the dog", "--run", "multi-head", "--output"],
}


def draw(output: Path, trained: Path, *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Draws a file, in the folder it is in, with no home that could be written."""
    runs = ["--checkpoint-dir", str(trained / "checkpoints")]
    arguments = ["attnlm", *COMMANDS[output.suffix], output.name, *runs]
    homes = ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    return subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c"),
            f"{before}{_COMMAND}sys.argv = {arguments!r}; exits.run_and_exit(run_command)",
        ],
        cwd=output.parent,
        env={**os.environ, **dict.fromkeys(homes, "/dev/null/home")},
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize("name", ["page.html", "picture.png"])
def test_without_a_folder_for_its_cache_it_says_so(
    name: str, trained: Path, tmp_path: Path
) -> None:
    done = draw(tmp_path / name, trained, before=_NO_TEMPORARY_FOLDER)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "error: matplotlib finds no folder that it can write to",
        "hint: set MPLCONFIGDIR or TMPDIR to one",
    ]
    assert done.stderr.lower().count("matplotlib") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["page.html", "picture.png"])
def test_it_draws_in_silence_without_a_home_and_whatever_a_users_settings(
    name: str, trained: Path, tmp_path: Path
) -> None:
    drawn = []
    for settings in ("", "image.origin: lower\naxes.facecolor: red\nno such line\n"):
        (tmp_path / "matplotlibrc").write_text(settings)
        done = draw(tmp_path / name, trained)
        assert done.returncode == 0 and "matplotlib" not in done.stderr.lower()
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1] and len(drawn[0]) > 10_000


def test_settings_that_cannot_be_read_are_one_line(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"\xff\xfe")
    done = draw(tmp_path / "picture.png", trained)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("error: matplotlib can't read its settings: ")
    assert done.stderr.splitlines()[-1].startswith("hint: ")
