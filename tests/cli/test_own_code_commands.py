"""Own code on the command line: who may run it, and what its errors say.

test_own_code.py has the rules for a file, and errors.toml names that no command accepts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnlm.base.files import read_json, write_json
from attnlm.data.dataset import Dataset
from attnlm.runs.run import open_run
from attnlm.training.step import Stepper
from tests import own_code
from tests.kit import command, fails, try_command

SMALL = [f"--{n.replace('_', '-')}={v}" for n, v in own_code.SMALL.items()]
SMALL += ["--embed-dim=8", "--heads=2"]
FILE = "my head.py"
KEPT = f"checkpoints/x/code/{FILE}"
MARK = "from pathlib import Path\n(Path({folder!r}) / 'ran').touch()\n"
"""leaves a file where code ran"""


@pytest.fixture(scope="module")
def made(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run whose code leaves a mark when it runs."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(dataset.path.parent, folder / "data")
    (folder / FILE).write_text(own_code.PARTS + MARK.format(folder=str(folder)))
    words = ["train", "--attention", f"{FILE}:Head", "--set", "start=2", "--name", "x", *SMALL]
    command(*words, cwd=folder)
    (folder / "ran").unlink()
    return folder


@pytest.fixture
def stranger(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of another user, who has a copy of the run; its code leaves its mark in `made`."""
    folder = tmp_path / "stranger"
    shutil.copytree(made, folder)
    own_code.become_another_user(monkeypatch, tmp_path)
    yield folder
    (made / "ran").unlink(missing_ok=True)


def ran(made: Path) -> bool:
    return (made / "ran").exists()


NEEDING = {
    "sample": "sample x --tokens 3",
    "eval": "eval x",
    "attend": "attend '1 apples' x",
    "heads": "heads x --windows 1",
    "report": "report x --windows 1",
    "resume": "train --resume x --steps 6",
    "from": "train --from x fruits-char --steps 2",
    "dry run": "train --dry-run --from x fruits-char",
}
SAMPLE, RESUME = (NEEDING[name].split() for name in ("sample", "resume"))


@pytest.mark.parametrize("words", NEEDING.values(), ids=NEEDING)
def test_no_command_runs_the_code_of_a_copied_run(made: Path, stranger: Path, words: str) -> None:
    sha256 = hashlib.sha256((stranger / KEPT).read_bytes()).hexdigest()
    before = sorted(stranger.rglob("*"))
    done = command(*shlex.split(words), cwd=stranger, code=1)
    error, hint = done.stderr.splitlines()[-2:]
    assert error == f"error: this run needs code of its own: {KEPT} (sha256 {sha256})"
    assert hint == f"hint: read it, then: attnlm {words} --code '{KEPT}'"
    assert done.stdout == ""
    assert sorted(stranger.rglob("*")) == before
    assert not ran(made)


def test_the_hint_lets_the_code_run_now_and_later(
    made: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(*SAMPLE, "--code", KEPT, cwd=stranger)
    assert ran(made)
    own_code.become_a_new_process(monkeypatch)
    for words in (SAMPLE, RESUME, ["train", "--dry-run", "--from", "x", "fruits-char"]):
        command(*words, cwd=stranger)


def test_commands_that_need_no_model_never_run_the_code(made: Path, stranger: Path) -> None:
    shutil.copytree(stranger / "checkpoints/x", stranger / "checkpoints/y")
    assert "Head" in command("list", "runs", cwd=stranger).stdout
    listed = json.loads(command("list", "runs", "--json", cwd=stranger).stdout)["runs"]
    assert [run["leaks"] for run in listed] == [None, None]
    command("compare", "x", "y", cwd=stranger)
    run = open_run(stranger / "checkpoints/x")
    assert run.evaluations()[-1].step == 4
    assert run.references() and "Head" in repr(run)
    assert not ran(made)


def forge(folder: Path, **changed: Any) -> None:
    """Write other settings to config.json, with a hash that fits."""
    content = read_json(folder / "config.json")
    content["config"] |= changed
    write_json(folder / "config.json", content)


@pytest.mark.parametrize("kind", ["attention", "loss"])
@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("{folder}/evil.py", "is not code that was named"),
        ("code/evil.py", "is not code that was named"),
        ("evil.py", "this run needs code of its own"),
    ],
    ids=["a path outside of the run", "a path inside of it", "a hash that fits"],
)
def test_a_name_in_config_json_runs_nothing(
    made: Path, stranger: Path, kind: str, named: str, says: str
) -> None:
    run, file = stranger / "checkpoints/x", named.format(folder=stranger)
    content = MARK.format(folder=str(made)) + own_code.PARTS
    for folder in (run / "code", stranger, run):
        (folder / "evil.py").write_text(content)
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    code = f"{read_json(run / 'config.json')['config']['code']} {file}:{sha256}"
    forge(run, **{kind: f"{file}:Head", "code": code})
    fails(*SAMPLE, cwd=stranger, code=1, says=says, hints="")
    assert not ran(made)


@pytest.mark.parametrize(
    ("name", "value"), [("start", [1]), ("start", {}), ("x\n\x1b[31m", 1), ("start", float("inf"))]
)
def test_forged_arguments_are_refused_in_one_line(stranger: Path, name: str, value: object) -> None:
    forge(stranger / "checkpoints/x", **{f"set.{name}": value})
    says = "config.json is not valid: invalid value for the argument"
    fails(*SAMPLE, cwd=stranger, code=1, says=says, hints="")


def test_another_file_is_not_used_in_place_of_the_recorded_one(made: Path, stranger: Path) -> None:
    shutil.move(stranger / FILE, stranger / "original.py")
    (stranger / FILE).write_text("x = 1\n")
    differs = {"says": "this run needs code of its own", "hints": f"x/code/{FILE}"}
    fails(*SAMPLE, "--code", FILE, cwd=stranger, code=1, **differs)
    (stranger / KEPT).write_text((stranger / KEPT).read_text().replace("start=1.0", "start=3.0"))
    changed = {"says": "has changed since the run began", "hints": "--code"}
    fails(*RESUME, cwd=stranger, code=1, **changed)
    fails(*RESUME, "--code", KEPT, cwd=stranger, code=1, **changed)
    assert not ran(made)
    command(*RESUME, "--code", "original.py", cwd=stranger)
    assert ran(made)


# --- Settings of own code -------------------------------------------------------------------------


def test_arguments_of_the_code_are_settings_of_runs_and_recipes(made: Path) -> None:
    path = made / "checkpoints/x/config.json"
    config = read_json(path)["config"]
    assert (config["set.start"], config["attention"]) == (2.0, f"{FILE}:Head")
    given = ["train", "--attention", f"{FILE}:Head"]
    command(*given, *SMALL, "--name=y", "--set", "start=3", "--set", "dropout=0.5", cwd=made)
    shown = command("compare", "x", "y", cwd=made).stdout
    assert [line.split() for line in shown.splitlines() if "set." in line] == [
        ["set.start", "2", "3"],
        ["set.dropout", "0", "0.5"],
    ]
    given.append("--print-config")
    printed = command(*given, *SMALL, "--set", "start=3", cwd=made).stdout
    assert '"set.start" = 3.0' in printed
    (made / "printed.toml").write_text(printed)
    assert command(*given, "--recipe", "printed.toml", cwd=made).stdout == printed
    assert '"set.start" = 2.0' in command(*given, "--recipe", path, cwd=made).stdout


# --- Errors in own code ---------------------------------------------------------------------------

WRONG = (
    own_code.PARTS
    + """
class Late(Gate):
    def forward(self, x):
        if self.training and x.size(0) > 1:
            return x @ x
        return super().forward(x)
"""
)


def test_an_error_in_training_shows_frames_of_the_code_and_leaves_no_run(project: Path) -> None:
    (project / "late.py").write_text(WRONG)
    words = ["train", "--attention", "late.py:Late", *SMALL[:-1]]
    with contextlib.chdir(project):
        done = try_command([*words, "--name", "late"])
    assert done.code == 1 and "internal error" not in done.stderr
    assert "in forward\n    return x @ x\n" in done.stderr
    assert "\nRuntimeError: " in done.stderr
    assert set(re.findall('File "(.*?)"', done.stderr)) == {str(project / "late.py")}
    assert not (project / "checkpoints/late").exists()


def test_an_error_outside_of_own_code_names_the_code_that_ran(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepper, "step", Stepper.step)  # restored at the end
    shutil.copytree(made / "data", tmp_path / "data")
    wrong = own_code.PARTS + "\nfrom attnlm.training.step import Stepper\nStepper.step = None\n"
    (tmp_path / "wrong.py").write_text(wrong)
    words = ["train", "--attention", "wrong.py:Head", *SMALL]
    fails(*words, cwd=tmp_path, code=1, says="wrong.py: 'NoneType'", hints="attnlm check")


def test_a_report_of_a_part_without_maps_has_the_rest(made: Path) -> None:
    words = ["train", "--attention", f"{FILE}:Convolution", "--name", "conv", *SMALL[:-1]]
    command(*words, cwd=made)
    for words in (["attend", "1 apples", "conv"], ["heads", "conv"], ["heads", "conv", "--ablate"]):
        says = "no attention weights were found"
        fails(*words, cwd=made, code=1, says=says, hints="softmax")
    command("report", "conv", cwd=made)
    page = (made / "checkpoints/conv/report.html").read_text()
    assert "multi-head-Convolution" in page and "fruits" in page
    for words in (["trace", "1 apples", "conv"], ["export", "conv", "out"]):
        done = command(*words, cwd=made, code=2)
        assert f"it computes {FILE}:Convolution" in done.stderr
