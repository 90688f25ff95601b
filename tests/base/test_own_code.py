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
from attnlm.workflows.job import announce
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


def recorded(path: Path, content: str = ANSWER, name: str = "f") -> OwnCode:
    """The code as a run's folder describes it."""
    return OwnCode(f"{path.name}:{name}", path, hashlib.sha256(content.encode()).hexdigest())


def the_list(tmp_path: Path) -> Path:
    return tmp_path / "config" / "accepted-code.txt"


def test_a_file_that_was_named_runs_once(file: Path) -> None:
    code = named_code(f"{file}:f")
    assert (code, code.path, code.sha256) == ("mine.py:f", file, recorded(file).sha256)
    assert not (file.parent / "ran").exists()  # naming it does not run it
    assert code.load()() == 42
    (file.parent / "ran").unlink()
    assert recorded(file).load() is code.load()
    assert not (file.parent / "ran").exists()


def test_a_file_that_a_folder_names_does_not_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert the_list(tmp_path).read_text() == f"{recorded(file).sha256}  mine.py\n"
    accept_code(file)
    assert len(the_list(tmp_path).read_text().splitlines()) == 1


def test_a_recorded_hash_accepts_no_other_file(file: Path) -> None:
    accept_code(file)
    own_code = recorded(file)
    forged = file.with_name("forged.py")
    forged.write_text("raise SystemExit('it ran')\n")
    for sha256 in ("", "x", "0" * 64, hashlib.sha256(b"other").hexdigest()):
        with pytest.raises(AttnlmError, match="has changed since the run began"):
            OwnCode("forged.py:f", forged, sha256).load()
    # The hash of an accepted file gets that file, whatever lies at the path.
    assert OwnCode("forged.py:f", forged, own_code.sha256).load()() == 42


def test_another_file_than_the_run_needs_is_not_accepted_for_it(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ANSWER.replace("42", "43"))
    accept_code(tmp_path / "mine.py")
    with pytest.raises(CodeNotAcceptedError, match="differs from") as refused:
        recorded(file).load()
    assert str(file) in refused.value.message


@pytest.mark.parametrize(
    "lines",
    [
        b"   \n",
        b"\xff\xfe\n",
        b"\0" * 99,
        b"*\n.*\n",
        b"\n\n",
        b"a" * 2**16,
        "\u2028 \x85 \n".encode(),
    ],
)
def test_garbage_in_the_list_accepts_nothing(file: Path, tmp_path: Path, lines: bytes) -> None:
    the_list(tmp_path).parent.mkdir()
    the_list(tmp_path).write_bytes(lines)
    with pytest.raises(CodeNotAcceptedError):
        recorded(file).load()
    accept_code(file)
    assert recorded(file).load()() == 42


def test_the_name_of_a_file_adds_no_line_to_the_list(file: Path, tmp_path: Path) -> None:
    forged = OwnCode(f"a\n{'0' * 64} b\u2028{'1' * 64}\udcff.py:f", file, recorded(file).sha256)
    forged.remember()
    (line,) = the_list(tmp_path).read_text().splitlines()
    assert line.startswith(forged.sha256)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_list_that_cannot_be_written_is_left_alone(
    file: Path, tmp_path: Path, is_folder: bool
) -> None:
    if is_folder:
        the_list(tmp_path).mkdir(parents=True)
    else:
        (tmp_path / "config").write_text("a file where the folder should be")
    accept_code(file)
    assert recorded(file).load()() == 42


def test_a_file_in_a_list_that_lacks_the_last_newline_is_remembered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_list(tmp_path).parent.mkdir()
    the_list(tmp_path).write_text("half a line")
    accept_code(file)
    own_code.become_a_new_process(monkeypatch)
    assert recorded(file).load()() == 42


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("import beside\n", "imports beside, a file next to it: a run keeps one file"),
        ("from inside import x\n", "imports inside, a file next to it"),
        (
            "import no_such_package.part\n",
            "needs the module no_such_package, which is not installed",
        ),
        ("", "mine.py has no class or function called f"),
        ("f = 3\n", "mine.py has no class or function called f"),
    ],
)
def test_a_file_that_cannot_be_used_gets_one_line(file: Path, content: str, says: str) -> None:
    file.with_name("beside.py").write_text("x = 1")
    file.with_name("inside").mkdir()
    file.with_name("inside").joinpath("__init__.py").write_text("x = 1")
    file.write_text(content)
    with pytest.raises(AttnlmError, match=says):
        named_code(f"{file}:f").load()
    with pytest.raises(AttnlmError, match=says):  # the second time too
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
    with pytest.raises(AttnlmError, match="needs the module hidden"):
        named_code(f"{file}:f").load()
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine.py", "does not name code"),
        ("mine.py:", "does not name code"),
        ("mine.py:a.b", "does not name code"),
        ("mine.txt:f", "does not name code"),
        ("other.py:f", "there is no file other.py"),
    ],
)
def test_a_text_that_names_no_code_is_refused(text: str, says: str) -> None:
    with pytest.raises(AttnlmError, match=says):
        named_code(text)


def traceback_of(run: Callable[[], Any]) -> str | None:
    with pytest.raises(BaseException) as raised:
        run()
    return own_traceback(raised.value)


def test_an_error_in_the_file_is_shown_from_its_first_frame_on(file: Path) -> None:
    file.write_text("import math\n\n\ndef f(x):\n    return math.sqrt(x)\n")
    f = named_code(f"{file}:f").load()
    shown = traceback_of(partial(f, -1))
    assert shown is not None
    assert shown.splitlines()[:3] == [
        "Traceback (most recent call last):",
        f'  File "{file}", line 5, in f',
        "    return math.sqrt(x)",
    ]
    assert shown.splitlines()[-1].startswith("ValueError: ")
    file.write_text("x = 1\nx / 0\n")
    shown = traceback_of(lambda: named_code(f"{file}:f").load())
    assert shown is not None
    assert shown.splitlines()[1] == f'  File "{file}", line 2, in <module>'
    assert "own_code.py" not in shown
    file.write_text("def f(:\n")
    shown = traceback_of(lambda: named_code(f"{file}:f").load())
    assert shown is not None and f'File "{file}", line 1' in shown and "SyntaxError" in shown
    assert traceback_of(lambda: math.sqrt(-1)) is None


def test_a_module_error_of_code_that_a_function_raises_is_its_own(file: Path) -> None:
    file.write_text("def f():\n    bytes([255]).decode()\n")
    assert "line 2, in f" in str(traceback_of(named_code(f"{file}:f").load()))
    file.write_text("bytes([255]).decode()\n")
    assert "line 1" in str(traceback_of(lambda: named_code(f"{file}:f").load()))


# --- Classes and functions that were passed in Python ---------------------------------------------

FACTOR = 6


def helper(x: int) -> int:
    return x * FACTOR


class Passed:
    def value(self) -> int:
        return helper(7) + math.floor(0.5)


def test_the_source_of_a_class_stands_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    code = passed_code(Passed)
    assert code == "passed.py:Passed"
    assert code.load() is Passed
    content = code.content()
    namespace: dict[str, Any] = {}
    exec(compile(content, "passed.py", "exec"), namespace)
    assert namespace["Passed"]().value() == 42
    own_code.become_a_new_process(monkeypatch)
    assert passed_code(Passed).sha256 == code.sha256


ids = object()  # a notebook has many such names


def last_of(ids: list[int]) -> int:
    return max(ids + 1 for ids in ids)


def test_an_argument_may_have_the_name_of_a_global() -> None:
    content = passed_code(last_of).content().decode()
    assert "object" not in content
    namespace: dict[str, Any] = {}
    exec(content, namespace)
    assert namespace["last_of"]([3, 4]) == 5


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

    with pytest.raises(UsageError, match="it needs outer of the function around it"):
        passed_code(Inner)
    with pytest.raises(UsageError, match="is not a class or function"):
        passed_code(partial(helper, 1))
    with pytest.raises(UsageError, match="is not a class or function"):
        passed_code(os)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be kept by itself"):
        passed_code(lambda: 1)


def test_a_typo_in_a_name_suggests_what_the_file_defines(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from pathlib import Path\n\nclass Temperature: ...\n")
    with pytest.raises(AttnlmError) as caught:
        named_code(f"{path}:Temperatur").load()
    assert caught.value.hint == "did you mean Temperature?"


def test_other_processes_get_no_code_that_may_not_run_here(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(): raise AssertionError\n# of somebody else\n")
    code = OwnCode("mine.py:f", path, hashlib.sha256(path.read_bytes()).hexdigest())
    run: Any = SimpleNamespace(config=SimpleNamespace(codes=[code]), path=path, content=dict)
    with pytest.raises(CodeNotAcceptedError):
        announce(ALONE, run)
