"""A file of the user's: when it may run, how it runs, and what its errors say."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.own_code import (
    CodeNotAcceptedError,
    OwnCode,
    accept_code,
    named_code,
    own_traceback,
    passed_code,
)
from attnlm.compute.processes import ALONE
from attnlm.workflows.train import Job, announce
from tests import own_code

ANSWER = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef f(): return 42\n"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own_code.become_another_user(monkeypatch, tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "mine.py"
    path.parent.mkdir()
    path.write_text(ANSWER)
    return path


@pytest.fixture
def accepted(tmp_path: Path) -> Path:
    """The list of the files that this user lets run."""
    return tmp_path / "config" / "accepted-code.txt"


def recorded(path: Path) -> OwnCode:
    """The code as a run's folder describes it."""
    return OwnCode(f"{path.name}:f", path, hashlib.sha256(ANSWER.encode()).hexdigest())


def test_a_file_that_was_named_runs_once(file: Path) -> None:
    code = named_code(f"{file}:f")
    assert (code, code.path, code.sha256) == ("mine.py:f", file, recorded(file).sha256)
    assert not (file.parent / "ran").exists()  # naming it does not run it
    assert code.load()() == 42
    (file.parent / "ran").unlink()
    assert recorded(file).load() is code.load()
    assert not (file.parent / "ran").exists()


def test_a_file_that_a_folder_names_does_not_run_unless_accepted(
    file: Path, accepted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CodeNotAcceptedError) as refused:
        recorded(file).load()
    wanted = f"this run needs code of its own: {file} (sha256 {recorded(file).sha256})"
    assert refused.value.message == wanted
    assert not (file.parent / "ran").exists()
    accept_code(file)
    assert recorded(file).load()() == 42
    own_code.become_a_new_process(monkeypatch)
    assert recorded(file).load()() == 42  # the list has it
    accept_code(file)
    assert accepted.read_text() == f"{recorded(file).sha256}  *  mine.py\n"


def test_a_recorded_hash_accepts_no_other_file(file: Path) -> None:
    accept_code(file)
    forged = file.with_name("forged.py")
    forged.write_text("raise SystemExit('it ran')\n")
    for sha256 in ("", "x", "0" * 64, hashlib.sha256(b"other").hexdigest()):
        with pytest.raises(AttnlmError, match="has changed since the run began"):
            OwnCode("forged.py:f", forged, sha256).load()
    # The hash of an accepted file gets that file, whatever lies at the path.
    assert OwnCode("forged.py:f", forged, recorded(file).sha256).load()() == 42


def test_another_file_than_the_run_needs_is_not_accepted_for_it(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ANSWER.replace("42", "43"))
    accept_code(tmp_path / "mine.py")
    with pytest.raises(CodeNotAcceptedError) as refused:
        recorded(file).load()
    assert str(file) in refused.value.message


@pytest.mark.parametrize(
    "lines",
    [b"   \n", b"\xff\xfe\n", b"\0" * 99, b"*\n.*\n", b"a" * 2**16, "\u2028 \x85 \n".encode()],
)
def test_garbage_in_the_list_accepts_nothing_and_spoils_no_line_after_it(
    file: Path, accepted: Path, lines: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted.parent.mkdir()
    accepted.write_bytes(lines)
    with pytest.raises(CodeNotAcceptedError):
        recorded(file).load()
    accept_code(file)
    own_code.become_a_new_process(monkeypatch)
    assert recorded(file).load()() == 42


def test_the_name_of_a_file_adds_no_line_to_the_list(file: Path, accepted: Path) -> None:
    forged = OwnCode(f"a\n{'0' * 64} b\u2028{'1' * 64}\udcff.py:f", file, recorded(file).sha256)
    forged.remember({})
    (line,) = accepted.read_text().splitlines()
    assert line.startswith(forged.sha256)


@pytest.mark.parametrize("in_the_way", ["config", "config/accepted-code.txt/folder/file"])
def test_a_list_that_cannot_be_written_is_left_alone(
    file: Path, tmp_path: Path, in_the_way: str
) -> None:
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).touch()
    accept_code(file)
    assert recorded(file).load()() == 42


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("import beside\n", "imports beside, which is not installed: a run keeps one file"),
        ("from inside import x\n", "imports inside, which is not installed"),
        (
            "from .beside import x\n",
            "imports a file of its package, which is not installed: a run keeps one file",
        ),
        ("import absent.part\n", "imports absent, which is not installed"),
        ("", "mine.py has no class or function called f"),
        ("f = 3\n", "mine.py has no class or function called f"),
    ],
)
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_a_file_that_cannot_be_used_gets_one_line(file: Path, content: str, says: str) -> None:
    file.with_name("beside.py").write_text("x = 1")
    file.with_name("inside").mkdir()
    file.write_text(content)
    for _ in range(2):  # the second time too
        with pytest.raises(AttnlmError, match=says):
            named_code(f"{file}:f").load()


def test_the_working_directory_is_not_on_the_path(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "work"), *sys.path])
    before = list(sys.path)
    Path("hidden.py").write_text("raise SystemExit('it ran')\n")
    file.write_text("import hidden\n")
    with pytest.raises(AttnlmError, match="imports hidden, which is not installed"):
        named_code(f"{file}:f").load()
    assert sys.path == before


def traceback_of(run: Callable[[], Any]) -> list[str]:
    with pytest.raises(BaseException) as raised:
        run()
    return (own_traceback(raised.value) or "").splitlines()


@pytest.mark.parametrize(
    ("content", "line", "error"),
    [
        ("x = 1\nx / 0\n", "line 2, in <module>", "ZeroDivisionError"),
        ("def f(:\n", "line 1", "SyntaxError"),
        # The file itself is UTF-8.
        ("bytes([255]).decode()\n", "line 1, in <module>", "UnicodeDecodeError"),
    ],
)
def test_an_error_in_the_file_is_shown_from_its_first_frame_on(
    file: Path, content: str, line: str, error: str
) -> None:
    file.write_text(content)
    shown = traceback_of(lambda: named_code(f"{file}:f").load())
    assert [words for words in shown if "File" in words] == [f'  File "{file}", {line}']
    assert shown[-1].startswith(error)


def test_an_error_in_a_function_of_the_file_is_shown_with_its_line(file: Path) -> None:
    file.write_text("import math\n\n\ndef f(x):\n    return math.sqrt(x)\n")
    shown = traceback_of(partial(named_code(f"{file}:f").load(), -1))
    assert shown[:3] == [
        "Traceback (most recent call last):",
        f'  File "{file}", line 5, in f',
        "    return math.sqrt(x)",
    ]
    assert shown[-1].startswith("ValueError: ")
    assert traceback_of(lambda: math.sqrt(-1)) == []


# --- Classes and functions that were passed in Python ---------------------------------------------

ids = object()  # a notebook has many such names


def last_of(ids: list[int]) -> int:
    return max(ids + 1 for ids in ids)


def test_an_argument_may_have_the_name_of_a_global() -> None:
    code = passed_code(last_of)
    assert b"object" not in code.content()
    names: dict[str, Any] = {}
    exec(code.content(), names)
    assert names["last_of"]([3, 4]) == 5


def test_a_class_of_own_code_keeps_its_file(file: Path) -> None:
    file.write_text("class A:\n    def f(self): pass\n")
    code = named_code(f"{file}:A")
    again = passed_code(code.load())
    assert (again, again.sha256, again.content()) == (code, code.sha256, file.read_bytes())


def test_code_that_needs_its_surroundings_is_refused() -> None:
    outer = 3

    class Inner:
        def value(self) -> int:
            return outer

    refused: dict[str, Any] = {
        "Inner is nothing or another": Inner,
        "functools.partial.* is not a class or function": partial(last_of, [1]),
        "<module 'os' .* is not a class or function": os,
        "cannot be kept by itself": lambda: 1,
    }
    for says, thing in refused.items():
        with pytest.raises(UsageError, match=says):
            passed_code(thing)


def test_other_processes_get_no_code_that_may_not_run_here(file: Path) -> None:
    config = SimpleNamespace(codes=[recorded(file)], arguments_of=lambda code: {})
    run: Any = SimpleNamespace(config=config, path=file)
    with pytest.raises(CodeNotAcceptedError):
        announce(ALONE, Job(run, None, is_fresh=False))
