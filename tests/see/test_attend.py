"""Attention in words, numbers and pictures."""

from __future__ import annotations

import itertools
import json
import shlex
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

from attnlm import attend, load_model, open_run
from attnlm.model.recorder import record
from attnlm.see.attend import Attention
from attnlm.see.shown_tokens import visible
from tests.kit import command, on_a_terminal, run_in_new_process

TEXT = "the quick fox.\nA"[:15]
PNG = b"\x89PNG"


def test_attend_equals_the_model(trained: Path) -> None:
    done = command("attend", TEXT, "transformer", "--json", cwd=trained)
    facts = json.loads(done.stdout)
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    seen = record(model, torch.tensor([run.tokenizer.encode(TEXT)]))
    np.testing.assert_allclose(facts["weights"], seen.maps[:, 0], atol=1e-5)
    assert "".join(facts["tokens"]) == TEXT
    assert "not an explanation" in done.stderr


def test_a_line_of_text_for_each_head_and_token_also_on_a_terminal(trained: Path) -> None:
    shown = command("attend", TEXT, "average", cwd=trained).stdout
    lines = shown.splitlines()
    assert lines[0] == "layer 1 head 1"
    assert lines[1].split() == ["0", "t", "t@0", "1.00"]
    assert lines[3].split() == ["2", "e", "t@0", "0.33", "h@1", "0.33", "e@2", "0.33"]
    assert len(lines) == 1 + len(TEXT)
    on_terminal = on_a_terminal("attend", TEXT, "average", cwd=trained)
    assert all(line in on_terminal for line in lines)


def test_invisible_characters_are_shown() -> None:
    assert visible("a b\n\x00é日\u200b") == "a␣b⏎\\x00é日\\u200b"


# --- Pictures -------------------------------------------------------------------------------------

ATTEND = "attend 'the dog' transformer"
PATCH = "patch 'the lazy dog' 'the lazy fox' tied --answers t x"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *itertools.product([ATTEND, PATCH], ("png", "svg")),
        ("heads tied --windows 3", "png"),
        ("heads tied --over-training", "svg"),
    ],
)
def test_a_picture_of_each_kind_is_the_same_each_time(
    words: str, kind: str, trained: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"map.{kind.upper()}"
    done = command(*shlex.split(words), "-o", path, "--json", cwd=trained)
    assert json.loads(done.stdout)["output"] == str(path)
    content = path.read_bytes()
    assert content.startswith({"png": PNG, "svg": b"<?xml"}[kind])
    if kind == "svg":
        assert xml.etree.ElementTree.fromstring(content).tag.endswith("svg")
    command(*shlex.split(words), "-o", path, cwd=trained)
    assert path.read_bytes() == content


def test_a_picture_has_the_past_of_each_head_and_names_its_tokens(trained: Path) -> None:
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    attention = attend("a fo", run)
    assert attention.grids[1].title == "layer 1 head 2" and attention.in_a_row == 2
    past = np.tril_indices(4)
    for grid, map_TT in zip(attention.grids, attention.weights.reshape(4, 4, 4), strict=True):
        np.testing.assert_array_equal(grid.values[past], map_TT[past])
        assert np.isnan(grid.values[np.triu_indices(4, 1)]).all()
    svg = attention.picture("svg").decode()
    assert ">␣</text>" in svg
    assert svg.count(">layer 1 head 2</text>") == 1
    assert svg.count(f">{attention.weights[0, 0, 0, 0]:.2f}</text>") >= 4
    assert attention._repr_png_().startswith(PNG)  # in a notebook


def test_a_large_table_has_colours_only() -> None:
    names = [str(n) for n in range(60)]
    large = Attention("run", "model", names, np.zeros((1, 1, 60, 60), np.float32))
    assert "0.00" not in large.picture("svg").decode() and len(large.picture()) < 50_000


def test_drawing_is_silent_without_a_home_and_with_user_settings(
    trained: Path, tmp_path: Path
) -> None:
    folder = ("multi-head", "--checkpoint-dir", str(trained / "checkpoints"))
    words = ("attend", "the dog", *folder, "--output")
    unusual: dict[Any, str] = {"image.origin": "lower", "axes.facecolor": "red"}
    command(*words, "usual.png", cwd=tmp_path)
    with matplotlib.rc_context(unusual):
        command(*words, "theirs.png", cwd=tmp_path)
    usual = (tmp_path / "usual.png").read_bytes()
    assert (tmp_path / "theirs.png").read_bytes() == usual
    settings = "".join(f"{name}: {value}\n" for name, value in unusual.items())
    (tmp_path / "matplotlibrc").write_text(f"{settings}no such line\n")
    homes = ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    env = {**dict.fromkeys(homes, "/dev/null/home"), "DISPLAY": None, "MPLBACKEND": None}
    done = run_in_new_process([*words, "again.png"], tmp_path, env=env)
    assert done.code == 0 and "matplotlib" not in done.stderr.lower()
    assert (tmp_path / "again.png").read_bytes() == usual
