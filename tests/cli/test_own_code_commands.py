"""Own code on the command line: who may run it, and what its errors say."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlm.base.files import read_json, write_json
from attnlm.data.dataset import Dataset
from attnlm.runs.run import open_run
from tests import own_code
from tests.kit import Done, command, fails, try_command

SMALL = [f"--{n.replace('_', '-')}={v}" for n, v in own_code.SMALL.items()]
SMALL += ["--embed-dim=8", "--heads=2"]
DATA = ("--data-dir", "data")

MARK = "from pathlib import Path\n(Path({folder!r}) / 'ran').touch()\n"
"""leaves a file where code ran"""


@pytest.fixture(scope="module")
def made(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run whose code leaves a mark when it runs."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(dataset.path.parent, folder / "data")
    content = own_code.PARTS + MARK.format(folder=str(folder))
    (folder / "mine.py").write_text(content)
    command("train", "--attention", "mine.py:Head", "--set", "start=2", "--name", "x", *SMALL,
           "fruits-char", cwd=folder)  # fmt: skip
    (folder / "ran").unlink()
    return folder


@pytest.fixture
def stranger(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of another user, who has a copy of the run; its code leaves its mark there."""
    folder = tmp_path / "stranger"
    shutil.copytree(made, folder)
    own_code.become_another_user(monkeypatch, tmp_path)
    yield folder
    (made / "ran").unlink(missing_ok=True)


def ran(made: Path) -> bool:
    return (made / "ran").exists()


NEEDING = {
    "sample": ["sample", "x", "--tokens", "3"],
    "eval": ["eval", "x"],
    "attend": ["attend", "1 apples", "x"],
    "heads": ["heads", "x"],
    "report": ["report", "x"],
    "resume": ["train", "--resume", "x", "--steps", "6"],
    "from": ["train", "--from", "x", "fruits-char", "--steps", "2"],
    "dry run": ["train", "--dry-run", "--from", "x", "fruits-char"],
}


@pytest.mark.parametrize("arguments", NEEDING.values(), ids=NEEDING)
def test_no_command_runs_the_code_of_a_copied_run(
    made: Path, stranger: Path, arguments: list[str]
) -> None:
    path = Path("checkpoints/x/code/mine.py")
    sha256 = hashlib.sha256((stranger / path).read_bytes()).hexdigest()
    before = sorted(stranger.rglob("*"))
    done = command(*arguments, cwd=stranger, code=1)
    error, hint = done.stderr.splitlines()[-2:]
    assert error == f"error: this run needs code of its own: {path} (sha256 {sha256})"
    words = " ".join(f"'{word}'" if " " in word else word for word in arguments)
    assert hint == f"hint: read it, then: attnlm {words} --code {path}"
    assert done.stdout == ""
    assert sorted(stranger.rglob("*")) == before
    assert not ran(made)


def test_the_hint_lets_the_code_run_now_and_later(
    made: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(*NEEDING["sample"], "--code", "checkpoints/x/code/mine.py", cwd=stranger)
    assert ran(made)
    own_code.become_a_new_process(monkeypatch)
    for arguments in NEEDING.values():
        command(*arguments, cwd=stranger)


def test_commands_that_need_no_model_never_run_the_code(made: Path, stranger: Path) -> None:
    shutil.copytree(stranger / "checkpoints/x", stranger / "checkpoints/y")
    assert "Head" in command("list", "runs", cwd=stranger).stdout
    (entry,) = json.loads(command("list", "runs", "--json", cwd=stranger).stdout)["runs"][:1]
    assert entry["leaks"] is None
    command("diff", "x", "y", cwd=stranger)
    run = open_run(stranger / "checkpoints/x")
    assert run.evaluations()[-1].step == 4
    assert run.references() and "Head" in repr(run)
    assert not ran(made)


def forge(folder: Path, **changed: Any) -> None:
    """Write other settings to config.json, with a hash that fits."""
    path = folder / "config.json"
    content = read_json(path)
    content["config"] |= changed
    write_json(path, content)


@pytest.mark.parametrize("kind", ["attention", "mlp", "model", "loss", "scores"])
@pytest.mark.parametrize(
    "named", ["/{evil}", "../evil.py:Head", "evil.py:Head", "./evil.py:Head", "code/evil.py:Head"]
)
def test_a_name_in_config_json_runs_nothing(
    made: Path, stranger: Path, kind: str, named: str
) -> None:
    folder = stranger / "checkpoints/x"
    content = MARK.format(folder=str(made)) + own_code.PARTS
    files = [folder / "evil.py", folder / "code/evil.py", folder / "code/code/evil.py"]
    files += [folder.parent / "evil.py", stranger / "evil.py"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    name = f"{stranger}/evil.py:Head" if named.startswith("/") else named
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    for code in (f"evil.py:{sha256}", f"{name.rpartition(':')[0]}:{sha256}", ""):
        forge(folder, **{kind: name, "code": code})
        # Every command opens the run in the same way: all of them try one kind of code.
        for arguments in NEEDING.values() if kind == "attention" else [NEEDING["sample"]]:
            done = here_in(stranger, arguments)
            assert done.code in (1, 2) and done.fault() is None, done.stderr
    assert not ran(made)


def here_in(folder: Path, arguments: list[str]) -> Done:
    with contextlib.chdir(folder):
        return try_command(arguments)


@pytest.mark.parametrize("kind", ["attention", "mlp", "model", "loss", "scores"])
def test_a_name_in_a_recipe_runs_nothing(made: Path, stranger: Path, kind: str) -> None:
    (stranger / "evil.py").write_text(MARK.format(folder=str(made)))
    (stranger / "r.toml").write_text(f'{kind} = "evil.py:Head"\n')
    for words in (["train"], ["train", "--dry-run"]):
        fails(*words, "--recipe", "r.toml", *DATA, "fruits-char",
              cwd=stranger, code=1, says="evil.py:Head", hints="")  # fmt: skip
    config = stranger / "checkpoints/x/config.json"
    forge(config.parent, **{kind: "evil.py:Head"})
    fails("train", "--recipe", config, *DATA, "fruits-char",
          cwd=stranger, code=1, says=".py:Head", hints="")  # fmt: skip
    assert not ran(made)


@pytest.mark.parametrize(
    ("name", "value"), [("start", [1]), ("start", {}), ("x\n\x1b[31m", 1), ("start", float("inf"))]
)
def test_forged_arguments_are_refused_in_one_line(stranger: Path, name: str, value: object) -> None:
    forge(stranger / "checkpoints/x", **{f"set.{name}": value})
    for arguments in (NEEDING["sample"], NEEDING["dry run"], NEEDING["resume"], ["diff", "x", "x"]):
        done = here_in(stranger, arguments)
        assert done.code == 1 and done.fault() is None, done.stderr
        assert "config.json is not valid: invalid value for the argument" in done.stderr


def test_print_config_prints_a_recipe(made: Path) -> None:
    given = ("train", "--attention", "mine.py:Head", "--print-config")
    printed = command(*given, *SMALL, "--set", "start=3", cwd=made).stdout
    assert '"set.start" = 3.0' in printed
    (made / "printed.toml").write_text(printed)
    assert command(*given, "--recipe", "printed.toml", cwd=made).stdout == printed
    config = made / "checkpoints/x/config.json"
    assert '"set.start" = 2.0' in command(*given, "--recipe", config, cwd=made).stdout


def test_a_changed_file_is_not_resumed_with(made: Path, stranger: Path) -> None:
    file = stranger / "checkpoints/x/code/mine.py"
    file.write_text(file.read_text().replace("start=1.0", "start=3.0"))
    changed = "has changed since the run began"
    fails(*NEEDING["resume"], cwd=stranger, code=1, says=changed, hints="--code")
    fails(*NEEDING["resume"], "--code", file, cwd=stranger, code=1, says=changed, hints="--code")
    assert not ran(made)
    command(*NEEDING["resume"], "--code", "mine.py", cwd=stranger)  # the original
    assert ran(made)


def test_an_error_names_a_file_that_differs(made: Path, stranger: Path) -> None:
    (stranger / "mine.py").write_text("x = 1\n")
    fails(*NEEDING["sample"], "--code", "mine.py", cwd=stranger, code=1,
          says="the file that --code names differs from", hints="x/code/mine.py")  # fmt: skip
    assert not ran(made)


# --- Settings of own code -------------------------------------------------------------------------


def test_arguments_of_the_code_are_settings(made: Path) -> None:
    config = read_json(made / "checkpoints/x/config.json")["config"]
    assert (config["set.start"], config["attention"]) == (2.0, "mine.py:Head")
    about = ("train", "--attention", "mine.py:Head", *SMALL, "fruits-char")
    command(*about, "--name", "y", "--set", "start=3", "--set", "dropout=0.5", cwd=made)
    shown = command("diff", "x", "y", cwd=made).stdout
    assert [line.split() for line in shown.splitlines() if "set." in line] == [
        ["set.start", "2", "3"],
        ["set.dropout", "0", "0.5"],
    ]
    for given, says, hints in (
        ("strat=2", "mine.py:Head has no argument 'strat'", "start"),
        ("start=two", "invalid value for start of mine.py:Head: 'two'", "type float"),
        ("embed_dim=2", "has no argument 'embed_dim'", ""),
    ):
        fails(*about, "--set", given, cwd=made, code=2, says=says, hints=hints)
    fails(*about, "--set", "start", cwd=made, code=2, says="has no value", hints="--set NAME=VALUE")
    fails("train", *SMALL, "--set", "a=1", cwd=made, code=2, says="no code of your own", hints="")


def test_a_file_name_may_have_spaces(made: Path) -> None:
    shutil.copy(made / "mine.py", made / "my head (2).py")
    command("train", "--attention", "my head (2).py:Head", "--name", "spaces", *SMALL,
           "fruits-char", cwd=made)  # fmt: skip
    command("sample", "spaces", "--tokens", "3", cwd=made)


# --- Errors in own code ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("import torch\nclass A(torch.nn.Module):\n    def __init__(self, embed_dim):\n"
         "        raise KeyError('mine')\n", ["line 4, in __init__", "KeyError: 'mine'"]),
        ("import torch\nclass A(torch.nn.Module):\n    def __init__(self, embed_dim):\n"
         "        super().__init__()\n    def forward(self, x):\n        return x @ x\n",
         ["line 6, in forward", "RuntimeError"]),
        ("x = 1\nx / 0\n", ["line 2, in <module>", "ZeroDivisionError"]),
        ("def f(:\n", ["line 1", "SyntaxError"]),
    ],
)  # fmt: skip
def test_an_error_in_the_code_shows_its_own_frames_only(
    project: Path, content: str, lines: list[str]
) -> None:
    (project / "bad.py").write_text(content)
    before = sorted(project.glob("checkpoints/*"))
    done = here_in(project, ["train", "--attention", "bad.py:A", *SMALL[:-1]])
    assert done.code == 1
    shown = done.stderr
    assert all(line in shown for line in lines), shown
    assert "attnlm/" not in shown and "internal error" not in shown
    for file in re.findall('File "(.*?)"', shown):
        assert file == str(project / "bad.py") or "/torch/" in file, file
    assert sorted(project.glob("checkpoints/*")) == before


def test_an_error_during_training_leaves_no_run(project: Path) -> None:
    content = own_code.PARTS + (
        "class Late(Gate):\n    calls = 0\n    def forward(self, x):\n"
        "        if self.training and x.size(0) > 1:\n            raise RuntimeError('late')\n"
        "        return super().forward(x)\n"
    )
    (project / "late.py").write_text(content)
    done = here_in(project, ["train", "--attention", "late.py:Late", *SMALL[:-1], "--name=late"])
    assert done.code == 1 and "RuntimeError: late" in done.stderr and "attnlm/" not in done.stderr
    assert not (project / "checkpoints/late").exists()


# --- A part without maps --------------------------------------------------------------------------


def test_a_report_of_a_part_without_maps_has_the_rest(made: Path) -> None:
    command("train", "--attention", "mine.py:Convolution", "--name", "conv", *SMALL[:-1],
           "fruits-char", cwd=made)  # fmt: skip
    for arguments in (
        ["attend", "1 apples", "conv"],
        ["heads", "conv"],
        ["heads", "conv", "--ablate"],
    ):
        fails(*arguments, cwd=made, code=1, says="no attention weights were found", hints="softmax")
    command("report", "conv", cwd=made)
    page = (made / "checkpoints/conv/report.html").read_text()
    assert "multi-head-Convolution" in page and "fruits" in page
    for arguments in (["trace", "1 apples", "conv"], ["export", "conv", "out"]):
        done = here_in(made, arguments)
        assert done.code in (1, 2) and done.fault() is None, done.stderr


def test_an_error_outside_of_own_code_names_the_code_that_ran(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "data", tmp_path / "data")
    wrong = own_code.PARTS + "\ntorch.set_grad_enabled(False)\n"
    (tmp_path / "wrong.py").write_text(wrong)
    words = ["train", "--attention", "wrong.py:Head", *SMALL, "fruits-char"]
    with torch.enable_grad():  # restored at the end
        fails(*words, cwd=tmp_path, code=1, says="wrong.py: element 0", hints="attnlm check")
