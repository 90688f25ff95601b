"""Commands that name a run and its folder, and what is suggested for a name that does not exist.

The names of options, commands and settings are in errors.toml.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from attnlm.base.errors import AttnlmError
from attnlm.base.folders import command_for, find_folder, write_latest
from attnlm.base.suggestions import _OTHER_NAMES, equivalent_name, suggestion
from attnlm.config.settings import RECORD_OF


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`checkpoints` with the runs old and new, and another folder with a run."""
    monkeypatch.chdir(tmp_path)
    for place in ("checkpoints/old", "checkpoints/new", "else where/other"):
        make(Path(place), "config.json")
    write_latest(Path("checkpoints"), "new")
    write_latest(Path("else where"), "other")
    return tmp_path


def make(folder: Path, file: str, age: int = 0) -> None:
    folder.mkdir(parents=True)
    (folder / file).write_text("{}")
    os.utime(folder / file, (2**30 - age, 2**30 - age))


@pytest.mark.parametrize(
    ("folder", "arguments"),
    [
        ("checkpoints/new", ""),
        ("checkpoints/old", " old"),
        ("else where/other", " other --checkpoint-dir 'else where'"),
    ],
)
def test_a_command_names_the_run_unless_it_is_the_newest_at_home(
    folder: str, arguments: str, runs: Path
) -> None:
    for path in (Path(folder), runs / folder):
        shown = arguments.replace("'else where'", shlex.quote(str(path.parent)))
        assert command_for("attnlm report", path) == f"attnlm report{shown}"
        name, _, place = shown.strip().partition(" ")
        resume = command_for("attnlm train --resume", path)
        assert resume == f"attnlm train --resume {name or 'new'} {place}".strip()
    if arguments == " old":
        sample = command_for("attnlm sample", Path(folder), "--tokens", "9")
        assert sample == "attnlm sample old --tokens 9"


def test_named_runs_are_found(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs / "checkpoints" / "old")
    assert command_for("attnlm report", Path()) == "attnlm report ."
    monkeypatch.chdir(runs / "checkpoints")
    assert command_for("attnlm report", Path("old")) == "attnlm report old --checkpoint-dir ."
    assert find_folder("old", Path(), kind="run") == Path("old")
    monkeypatch.chdir(runs)
    for content in (b"x" * 5000, b"gone\n"):
        Path("checkpoints/latest").write_bytes(content)
        assert command_for("attnlm report", Path("checkpoints/new")) == "attnlm report new"
    make(Path("data/text"), "meta.json")
    write_latest(Path("data"), "text")
    assert command_for("attnlm train", Path("data/text"), kind="data set") == "attnlm train"
    elsewhere = command_for("attnlm train", Path("mine/text"), kind="data set")
    assert elsewhere == "attnlm train text --data-dir mine"


def test_lists_of_names_begin_with_the_newest_and_hold_one_kind(tmp_path: Path) -> None:
    for age, name in enumerate(("zebra", "apple", "mule", "boar", "cow", "fox")):
        make(tmp_path / name, "config.json", age)
    make(tmp_path / "ladder-001", "ladder.json")
    (tmp_path / "notes").mkdir()
    for name, hint in (
        ("psalms", "there are zebra, apple, mule, boar, cow and 1 more"),
        ("base", "there are zebra, apple, mule, boar, cow and 1 more"),  # also an option that left
        ("my-fox", "did you mean fox?"),
    ):
        with pytest.raises(AttnlmError) as caught:
            find_folder(name, tmp_path, kind="run")
        assert caught.value.hint == hint
    write_latest(tmp_path, "deleted")
    assert find_folder(None, tmp_path, kind="run").name == "zebra"
    write_latest(tmp_path, "mule")
    assert find_folder(None, tmp_path, kind="run").name == "mule"


def test_names_with_a_common_prefix_are_suggested_the_first_in_a_tie() -> None:
    assert suggestion("my-run", ["multi-head-001", "my"], "none") == "did you mean my?"
    tie = suggestion("multi", ["multi-head-002", "multi-head-001"], "")
    assert tie == "did you mean multi-head-002?"
    assert suggestion("bigram-1", ["bigram-001", "bigram-002"], "") == "did you mean bigram-001?"
    assert suggestion("nobody", ["multi-head-001", "my"], "none") == "none"
    assert suggestion("x", [], "none") == "none"


def test_settings_do_not_clash_with_terms_of_other_tools() -> None:
    """Or the table would answer with the wrong one where both exist."""
    for name in RECORD_OF:
        assert equivalent_name(name, RECORD_OF) == name
    for ours, others in _OTHER_NAMES.items():
        if ours in RECORD_OF:
            assert {equivalent_name(other, RECORD_OF) for other in others.split()} == {ours}


IN_PYTHON = """
import attnlm
dataset = attnlm.prepare("text.txt")
run = attnlm.train(steps=1, model="bigram", block_size=4)
print(dataset.path, run.path, attnlm.open_run().name, len(attnlm.list_runs()))
"""


def test_variables_name_the_folders_of_data_sets_and_runs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 9)
    folders = {"ATTNLM_DATA_DIR": "texts", "ATTNLM_CHECKPOINT_DIR": "~/models"}
    models = tmp_path / "models"

    def said(*words: str) -> str:
        environment = {**os.environ, **folders, "HOME": str(tmp_path)}
        python = [sys.executable, *words]
        return subprocess.check_output(python, cwd=tmp_path, env=environment, text=True)

    said_in_python = said("-c", IN_PYTHON).split()
    assert said_in_python == ["texts/text-char", f"{models}/bigram-001", "bigram-001", "1"]
    attnlm = ("-m", "attnlm")
    assert said(*attnlm, "prepare", "text.txt", "--name=again") == "texts/again\n"
    train = ("train", "again", "--steps=1", "--model=bigram", "--block-size=4")
    assert said(*attnlm, *train) == f"{models}/bigram-002\n"
    assert said(*attnlm, "prepare", "text.txt", "--data-dir", "data") == "data/text-char\n"
    assert said(*attnlm, *train, "--checkpoint-dir", "mine") == "mine/bigram-001\n"
