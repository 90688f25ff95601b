"""Output of `attend` in words, colours, numbers and pictures."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from attnlm.model.recorder import record
from attnlm.runs.load_model import load_model
from attnlm.runs.run import open_run
from attnlm.see import pictures
from attnlm.see.attend import attend, in_colour
from attnlm.see.attend_page import attention_page
from attnlm.see.shown_tokens import tint, visible
from tests.kit import command, fails, on_a_terminal

TEXT = "the dog.\nth"


def test_attend_equals_the_model(trained: Path) -> None:
    done = command("attend", TEXT, "--run", "transformer", "--json", cwd=trained)
    facts = json.loads(done.stdout)
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    ids = torch.tensor(run.tokenizer.encode(TEXT))
    maps = record(model, ids[None]).maps[:, 0]
    np.testing.assert_allclose(facts["weights"], maps.numpy(), atol=1e-5)
    assert np.shape(facts["weights"]) == (2, 2, len(TEXT), len(TEXT))
    assert "".join(facts["tokens"]) == TEXT
    with torch.inference_mode():
        probabilities = torch.softmax(model.eval()(ids[None])[0, -1], -1).sort(descending=True)
    found = [candidate["probability"] for candidate in facts["next"]]
    np.testing.assert_allclose(found, probabilities.values[:10].numpy(), atol=1e-5)
    assert "not an explanation" in done.stderr


def test_words_without_a_terminal_and_blocks_of_colour_on_one(trained: Path) -> None:
    shown = command("attend", TEXT, "--run", "average", cwd=trained).stdout
    lines = shown.splitlines()
    assert lines[0] == "layer 1 head 1"
    assert lines[1].split() == ["0", "t", "t@0", "1.00"]
    assert lines[3].split() == ["2", "e", "t@0", "0.33", "h@1", "0.33", "e@2", "0.33"]
    assert lines[1 + len(TEXT)] == "next token" and "\x1b" not in shown
    assert "\x1b[" in on_a_terminal("attend", "the", "--run", "average", cwd=trained)
    plain = on_a_terminal("attend", "the", "--run", "average", cwd=trained, NO_COLOR="1")
    assert "\x1b" not in plain and "t@0 0.33" in plain


def test_a_square_per_head_and_one_line_where_that_is_too_wide(trained: Path) -> None:
    run = open_run("multi-head", checkpoint_dir=trained / "checkpoints")
    attention = attend(run, "the")
    (layer,) = in_colour(attention, 80)
    squares: list[Any] = list(layer.renderables)
    assert [square.plain.splitlines() for square in squares] == [
        [f"layer 1 head {head}", "t  t ", "h  t h ", "e  t h e "] for head in (1, 2)
    ]
    for square, map_TT in zip(squares, attention.weights[0], strict=True):
        wanted = [tint(weight) for t in range(3) for weight in map_TT[t, : t + 1].tolist()]
        assert [span.style for span in square.spans] == wanted
    shown = io.StringIO()
    Console(file=shown, width=32).print(layer)
    assert [line.split() for line in shown.getvalue().splitlines()[1:]] == [
        ["t", "t"] * 2, ["h", "t", "h"] * 2, ["e", "t", "h", "e"] * 2, []
    ]  # fmt: skip
    (narrow,) = in_colour(attention, 8)
    squares = list(narrow.renderables)
    assert [square.plain for square in squares] == [
        f"layer 1 head {head}, the last token\ne  t h e \n" for head in (1, 2)
    ]


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_a_picture_is_the_same_each_time(kind: str, trained: Path) -> None:
    name = f"map.{kind.upper()}"
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    done = command("attend", TEXT, run.name, "-o", name, "--json", cwd=trained)
    assert json.loads(done.stdout)["output"] == name
    content, attention = (trained / name).read_bytes(), attend(run, TEXT)
    assert content == (
        attention_page(attention) if kind == "html" else pictures.attention_picture(attention, kind)
    )
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype"}[kind])
    if kind == "svg":
        assert xml.etree.ElementTree.fromstring(content).tag.endswith("svg")


def test_long_texts_are_cut_to_their_last_tokens_with_a_note(trained: Path) -> None:
    run = open_run("multi-head", checkpoint_dir=trained / "checkpoints")
    notes: list[object] = []
    fitting = TEXT * 40
    fitting = fitting[-run.config.spec.block_size :]
    attention = attend(run, TEXT * 40, on_event=notes.append)
    assert "".join(attention.tokens) == fitting
    np.testing.assert_array_equal(attention.weights, attend(run, fitting).weights)
    (note,) = notes
    assert f"the last {run.config.spec.block_size}" in str(note)


def test_attend_refuses_bad_arguments(trained: Path) -> None:
    for arguments, code, says, hints in [
        (["the", "--run", "bigram"], 1, "no attention", "single-head"),
        (["", "--run", "average"], 2, "empty", "at least one"),
        (["Ü", "--run", "average"], 1, "lacks 'Ü'", "byte"),
        (["the", "-o", "map.pdf"], 2, "map.pdf", ".html or .png"),
        (["the", "-o", "nowhere/map.png"], 1, "folder not found: nowhere", "create it"),
    ]:
        fails("attend", *arguments, cwd=trained, code=code, says=says, hints=hints)


def test_invisible_characters_are_shown() -> None:
    assert visible("a b\n\x00é日\u200b") == "a␣b⏎\\x00é日\\u200b"


# --- Pictures in any surroundings of matplotlib --------------------------------------------

_PROGRAM = """
import sys
import attnlm.workflows.train
assert "matplotlib" not in sys.modules  # until something is drawn
from attnlm.cli import exits
from attnlm.cli.app import run_command
for sys.argv in {}:
    assert exits.run(run_command) == 0
"""


def test_drawing_is_silent_without_a_home_and_with_user_settings(
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
    for words in commands:
        command(*words, cwd=usual)
        assert (usual / words[-1]).read_bytes() == (tmp_path / words[-1]).read_bytes()


def test_a_picture_takes_an_installed_font_that_has_the_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody_has, one_has = "\U00010600", "\U00010601"  # Linear A

    def characters(path: str) -> frozenset[int]:
        installed = real(path) - {ord(nobody_has), ord(one_has)}
        return installed | {ord(one_has)} if "cmr10" in path else installed

    real = pictures._characters
    monkeypatch.setattr(pictures, "_characters", characters)
    families, missing = pictures.find_fonts("the" + nobody_has)
    assert missing == nobody_has and pictures.find_fonts("the") == (families, "")
    assert pictures.find_fonts("the" + one_has) == ([*families, "cmr10"], "")


def test_characters_without_a_font_are_reported_and_stay_text_in_svg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, real = "猫", pictures._characters
    monkeypatch.setattr(pictures, "_characters", lambda path: real(path) - {ord(odd)})
    (tmp_path / "text.txt").write_text(f"the {odd} " * 200, encoding="utf-8")
    command("prepare", "text.txt", cwd=tmp_path)
    sizes = ("--model", "multi-head", "--steps", "1", "--block-size", "8", "--embed-dim", "8")
    command("train", *sizes, "--name", "odd", cwd=tmp_path)
    says = f"no installed font has {odd}, so boxes are drawn instead"
    for text, picture, is_said in (
        *((f"the {odd}", "a.png", True), ("the", "b.png", False), (f"the {odd}", "a.svg", False)),
    ):
        done = command("attend", text, "odd", "-o", picture, cwd=tmp_path)
        assert (says in done.stderr) == is_said
    assert f">{odd}</text>" in (tmp_path / "a.svg").read_text(encoding="utf-8")
