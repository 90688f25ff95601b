"""Pictures by matplotlib: whatever its surroundings, it keeps quiet or ends with one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlm.see import pictures
from tests.command import attnlm

_PROGRAM = """
import sys
import attnlm.experiments.train
assert "matplotlib" not in sys.modules  # until something is drawn
from attnlm.cli import exits
from attnlm.cli.app import run_command
for sys.argv in {}:
    assert exits.run(run_command) == 0
"""


def test_it_draws_in_silence_without_a_home_and_whatever_a_users_settings(
    trained: Path, tmp_path: Path
) -> None:
    runs = ["--checkpoint-dir", str(trained / "checkpoints")]
    commands = [
        ["report", "multi-head", *runs, "--output", "page.html"],
        ["attend", "the dog", "multi-head", *runs, "--output", "picture.png"],
    ]
    (tmp_path / "matplotlibrc").write_text(
        "image.origin: lower\naxes.facecolor: red\nno such line\n"
    )
    homes = ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    program = _PROGRAM.format([["attnlm", *command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={**environment, **dict.fromkeys(homes, "/dev/null/home")},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and "matplotlib" not in done.stderr.lower()
    usual = tmp_path / "usual"
    usual.mkdir()
    for command in commands:
        attnlm(*command, cwd=usual)
        assert (usual / command[-1]).read_bytes() == (tmp_path / command[-1]).read_bytes()


def test_a_picture_takes_an_installed_font_that_has_the_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody_has, one_has = "\U00010600", "\U00010601"  # Linear A

    def characters(path: str) -> frozenset[int]:
        installed = real(path) - {ord(nobody_has), ord(one_has)}
        return installed | {ord(one_has)} if "cmr10" in path else installed

    real = pictures._characters
    monkeypatch.setattr(pictures, "_characters", characters)
    families, missing = pictures.fonts_for("the" + nobody_has)
    assert missing == nobody_has and pictures.fonts_for("the") == (families, "")
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
    says = f"no installed font has {odd}, so boxes are drawn instead"
    for text, picture, is_said in (
        *((f"the {odd}", "a.png", True), ("the", "b.png", False), (f"the {odd}", "a.svg", False)),
    ):
        done = attnlm("attend", text, "odd", "-o", picture, cwd=tmp_path)
        assert (says in done.stderr) == is_said
    assert f">{odd}</text>" in (tmp_path / "a.svg").read_text(encoding="utf-8")
