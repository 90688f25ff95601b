"""Ladders with rungs of the user's own code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note
from attnlm.base.files import read_json, write_json
from attnlm.see.ladder_page import explain_rungs
from tests import own_code
from tests.kit import command, try_command

SMALL: dict[str, Any] = {"steps": 4, "eval_every": 2, "seed": 1, "tokens": 10}
HEAD = "multi-head:embed_dim=8:heads=2:attention={}:Head:start=2"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return own_code.written(tmp_path / "code")


@pytest.fixture(scope="module")
def finished(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished ladder runs/x of a bigram and a rung of the user's."""
    folder = tmp_path_factory.mktemp("finished")
    rungs = ["bigram", HEAD.format(own_code.written(folder / "code") / "parts.py")]
    folders: dict[str, Any] = {"checkpoint_dir": folder / "runs", "data_dir": project / "data"}
    attnlm.ladder("fruits-char", rungs=rungs, **SMALL, **folders, name="x")
    return folder


def mark(folder: Path) -> str:
    return f"\nfrom pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n"


def test_a_rung_of_the_users_is_compared(
    code: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = HEAD.format(code / "parts.py")
    about: dict[str, Any] = {"rungs": ["bigram", "multi-head", rung], **SMALL}
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path / "runs", "data_dir": project / "data"}
    compared = attnlm.ladder("fruits-char", **about, **folders, name="mine", seeds=2)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    kept = "mine-multi-head-embed_dim-8-heads-2-attention-parts.py-Head-start-2"
    assert [n for n in names if "parts" in n] == [kept, f"{kept}-seed-2"]
    run = compared.rungs[-1].run
    assert run.config.settings()["set.start"] == 2.0
    assert run.config.settings()["batch_size"] == compared.rungs[0].run.config.training.batch_size
    (faster,) = (warning for warning in compared.warnings if "faster forms" in warning)
    assert rung in faster and "bigram" not in faster
    _, said = explain_rungs(compared)[-1]
    assert f"heads 2 and attention {code}/parts.py:Head and start 2" in said
    compared.write_page()
    assert "parts.py:Head" in (compared.path / "index.html").read_text()

    # Going on in a new process needs neither the file nor its name.
    (code / "parts.py").unlink()
    own_code.become_a_new_process(monkeypatch)
    notes: list[object] = []
    again = attnlm.ladder(resume=compared.path, on_event=notes.append, **folders)
    assert [r.loss for r in again.rungs] == [r.loss for r in compared.rungs]
    assert sum("is done" in str(n) for n in notes if isinstance(n, Note)) == 6


def test_a_ladder_goes_on_where_its_second_rung_was_stopped(
    code: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = HEAD.format(code / "parts.py")
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path / "runs", "data_dir": project / "data"}

    def stop(event: object) -> None:
        if isinstance(event, Note) and "rung 2" in event.text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attnlm.ladder(
            "fruits-char", rungs=["bigram", rung], **SMALL, **folders, name="x", on_event=stop
        )
    own_code.become_another_user(monkeypatch, tmp_path)
    with pytest.raises(AttnlmError, match="this run needs code of its own") as refused:
        attnlm.ladder(resume=tmp_path / "runs/x", **folders)
    assert str(tmp_path / "runs/x/code/parts.py") in refused.value.message
    attnlm.accept_code(tmp_path / "runs/x/code/parts.py")
    compared = attnlm.ladder(resume=tmp_path / "runs/x", **folders)
    assert [r.model for r in compared.rungs] == ["bigram", rung]


@pytest.mark.parametrize("form", ["hash", "no hash", "other name", "changed file"])
def test_a_forged_ladder_runs_nothing(
    form: str, finished: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    evil = tmp_path / "evil.py"
    content = own_code.PARTS + mark(tmp_path)
    for path in (evil, tmp_path / "runs/x/code/evil.py", tmp_path / "runs/x/code/parts.py"):
        path.write_text(content)
    path = tmp_path / "runs/x/ladder.json"
    plan = read_json(path)
    (name,) = plan["plan"]["codes"]
    if form == "no hash":
        plan["plan"]["codes"] = {}
    elif form == "other name":
        changed = HEAD.format(evil)
        plan["plan"]["rungs"] = ["bigram", changed]
        plan["plan"]["codes"] = {}
    elif form == "hash":
        plan["plan"]["codes"] = {name: hashlib.sha256(content.encode()).hexdigest()}
    write_json(path, plan)
    own_code.become_another_user(monkeypatch, tmp_path)
    with contextlib.chdir(tmp_path):
        done = try_command(["ladder", "--resume", "x", "--checkpoint-dir", "runs", "--data-dir",
                     str(project / "data")])  # fmt: skip
    assert done.code in (1, 2) and done.fault() is None, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("codes", [{"parts.py:Head": 3}, {"x": "y"}, {"": ""}, [1], "x", None])
def test_a_damaged_list_of_code_is_one_line(
    codes: Any, finished: Path, project: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "runs/x/ladder.json"
    plan = read_json(path)
    plan["plan"]["codes"] = codes
    write_json(path, plan)
    with pytest.raises(AttnlmError, match="ladder"):
        attnlm.ladder(resume=tmp_path / "runs/x", data_dir=project / "data")


def test_two_files_of_one_name_are_refused(code: Path, project: Path, tmp_path: Path) -> None:
    other = own_code.written(tmp_path / "other")
    (other / "parts.py").write_text(own_code.PARTS + "# other\n")
    rungs = [HEAD.format(folder / "parts.py") for folder in (code, other)]
    with pytest.raises(UsageError, match=r"two files are called parts.py"):
        attnlm.ladder("fruits-char", rungs=rungs, **SMALL, data_dir=project / "data",
                      checkpoint_dir=tmp_path / "runs")  # fmt: skip
    assert not (tmp_path / "runs").exists()


def test_wrong_rungs_are_refused_before_training(code: Path, project: Path, tmp_path: Path) -> None:
    for change, says in (
        ("strat=1", "no argument 'strat'"),
        ("start=two", "invalid value for start"),
        ("heads=two", "invalid value for `heads`"),
    ):
        rung = f"multi-head:attention={code}/parts.py:Head:{change}"
        with pytest.raises(UsageError, match=says):
            attnlm.ladder("fruits-char", rungs=["bigram", rung], **SMALL,
                          data_dir=project / "data", checkpoint_dir=tmp_path / "runs")  # fmt: skip
        assert not (tmp_path / "runs").exists()


def test_the_command_takes_a_rung_of_the_users(code: Path, project: Path, tmp_path: Path) -> None:
    rungs = f"single-head,single-head:attention={code}/parts.py:Fused,{code}/models.py:lecture"
    done = command("ladder", "fruits-char", "--rungs", rungs, "--steps", 2, "--tokens", 5, "--json",
                   "--checkpoint-dir", tmp_path / "runs", cwd=project)  # fmt: skip
    assert len(json.loads(done.stdout)["rungs"]) == 3
