"""Pictures by matplotlib: whatever its surroundings, it keeps quiet or ends with one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlm.see import pictures
from tests.command import attnlm

_COMMANDS = """
import sys
import attnlm.experiments.train
assert "matplotlib" not in sys.modules  # until something is drawn
{before}
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
    """Draws into a folder, without a display and with no home that could be written."""
    runs = ["--checkpoint-dir", str(trained / "checkpoints")]
    arguments = [["attnlm", *command, *runs] for command in commands]
    homes = ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    program = _COMMANDS.format(arguments=arguments, before=before)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        env={**environment, **dict.fromkeys(homes, "/dev/null/home")},
        capture_output=True,
        encoding="utf-8",
    )


def test_without_a_folder_for_its_cache_it_says_so(trained: Path, tmp_path: Path) -> None:
    nowhere = "import tempfile; tempfile.tempdir = '/dev/null/temporary'"
    done = draw(tmp_path, trained, PAGE, PICTURE, before=nowhere)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines.count("error: matplotlib finds no folder that it can write to") == 2
    assert lines[-1] == "hint: set MPLCONFIGDIR or TMPDIR to one"
    assert done.stderr.lower().count("matplotlib") == 2
    assert not list(tmp_path.iterdir())


def test_it_draws_in_silence_without_a_home_and_whatever_a_users_settings(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "matplotlibrc").write_text(
        "image.origin: lower\naxes.facecolor: red\nno such line\n"
    )
    done = draw(tmp_path, trained, PAGE, PICTURE)
    assert done.returncode == 0 and "matplotlib" not in done.stderr.lower()
    usual = tmp_path / "usual"
    usual.mkdir()
    for command in (PAGE, PICTURE):
        attnlm(*command, "--checkpoint-dir", trained / "checkpoints", cwd=usual)
        name = command[-1]
        assert (usual / name).read_bytes() == (tmp_path / name).read_bytes()


def test_settings_that_cannot_be_read_are_one_line(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_bytes(b"\xff\xfe")
    done = draw(tmp_path, trained, PICTURE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("error: matplotlib can't read its settings: ")
    assert done.stderr.splitlines()[-1].startswith("hint: ")


def test_a_picture_takes_an_installed_font_that_has_the_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody_has, one_has = "\U00100001", "\U00100002"
    families, missing = pictures.fonts_for("the" + nobody_has)
    assert missing == nobody_has and pictures.fonts_for("the") == (families, "")
    real = pictures._characters
    monkeypatch.setattr(
        pictures,
        "_characters",
        lambda path: real(path) | {ord(one_has)} if "cmr10" in path else real(path),
    )
    assert pictures.fonts_for("the" + one_has) == ([*families, "cmr10"], "")


def test_characters_that_no_font_has_are_said_and_stay_text_in_an_svg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, real = "猫", pictures._characters
    monkeypatch.setattr(pictures, "_characters", lambda path: real(path) - {ord(odd)})
    (tmp_path / "text.txt").write_text(f"the {odd} " * 200, encoding="utf-8")
    attnlm("prepare", "text.txt", cwd=tmp_path)
    sizes = ("--model", "multi-head", "--steps", "1", "--block-size", "8", "--embed-dim", "8")
    attnlm("train", *sizes, "--name", "odd", cwd=tmp_path)
    said = attnlm("attend", f"the {odd}", "odd", "-o", "a.png", cwd=tmp_path).stderr
    assert f"no installed font has {odd}, drawn as boxes" in said
    said = attnlm("attend", "the", "odd", "-o", "b.png", cwd=tmp_path).stderr
    assert "boxes" not in said
    said = attnlm("attend", f"the {odd}", "odd", "-o", "a.svg", cwd=tmp_path).stderr
    assert "boxes" not in said
    assert f">{odd}</text>" in (tmp_path / "a.svg").read_text(encoding="utf-8")
