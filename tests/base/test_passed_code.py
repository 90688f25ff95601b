"""The source that is kept of a class that was passed in Python, from scripts and notebooks."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.own_code import OwnCode, passed_code
from tests import own_code


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    own_code.become_another_user(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def script(tmp_path: Path, text: str | bytes) -> dict[str, Any]:
    """Run a script, and return its names."""
    path = tmp_path / "script.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module
    spec.loader.exec_module(module)
    return vars(module)


def notebook(*cells: str) -> dict[str, Any]:
    """Run the cells of a notebook as IPython does, and return their names."""
    module = sys.modules["notebook"] = ModuleType("notebook")
    scope = vars(module)
    scope |= {"In": [""], "get_ipython": MagicMock(__module__="IPython")}
    for cell in cells:
        scope["In"].append(cell)
        with contextlib.suppress(SyntaxError, ZeroDivisionError):  # the next cell runs
            exec(compile(cell, "<cell>", "exec", dont_inherit=True), scope)
    return scope


def value(code: OwnCode) -> Any:
    """What the kept source returns, run by itself as in another process."""
    scope: dict[str, Any] = {"__name__": "other"}
    exec(compile(code.content(), code.file, "exec", dont_inherit=True), scope)
    return scope[code.name]().value()


PART = "class Part:\n    def value(self):\n        return {}\n"

SCRIPTS: dict[str, str | bytes] = {
    "constants": "A, B = 1, 2\nC: int = A + B\nC += 1\nD = [A, C]\nD = tuple(D)\n"
    + PART.format("(A, B, C, D)"),
    "no literals": 'import math\nimport numpy as np\nimport torch\nfrom typing import NamedTuple\n'
    'A = float("-inf")\nB = math.inf\nC = np.float64(.5)\nD = torch.Size([2])\n'
    "class Two(NamedTuple):\n    x: int\nE = Two(1)\n"
    + PART.format("(A, B, C, D, E.x, type(C).__name__)"),
    "branches": "if True:\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    + PART.format("f()"),
    "a class in an if": "if 1:\n    class Part:\n        def value(self): return 3\n",
    "a nested class": PART.format("1") + "class Other:\n    class Part:\n"
    "        def value(self): return 2\n",
    "a method of the same name": "def f(): return 1\nclass A:\n    def f(self): return 2\n"
    + PART.format("f()"),
    "separators": "A = '\u2028 \x0c \x85'\n\x0c\n" + PART.format("len(A), '\u2028', 'end'"),
    "carriage returns": ("A = 1\r\n" + PART.format("A")).replace("\n", "\r\n"),
    "one line": "import math; A = 1; B = math.floor(2.5); raise_ = 3\n" + PART.format("A + B"),
    "an encoding": "# coding: latin-1\nA = 'é'\n".encode("latin-1") + PART.format("A").encode(),
    "a lambda": "A = 3\nf = lambda x: x * A\nclass Part:\n    g = lambda self: f(2)\n"
    "    def value(self): return self.g()\n",
    "dataclass": "from dataclasses import dataclass, field\nN = 4\n@dataclass\nclass Part:\n"
    "    x: int = N\n    y: list = field(default_factory=list)\n"
    "    def value(self): return self.x\n",
    "decorators": "import functools\ndef twice(f):\n    @functools.wraps(f)\n"
    "    def g(*a): return 2 * f(*a)\n    return g\nclass Part:\n    @twice\n"
    "    def value(self): return 4\n",
    "try": "try:\n    import absent as x\nexcept ImportError:\n    x = None\n" + PART.format("x"),
    "type checking": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from absent import X\ndef f(x: X) -> X: return 5\n"
    + PART.format("f(1)"),
    "future": '"""Text."""\nfrom __future__ import annotations\ndef f(x: nothing): return 5\n'
    + PART.format("f(1)"),
    "aliases": "Number = int | float\ndef f(x: Number): return x\nValue = list[Number]\n"
    + PART.format("f(1), str(Value)"),
    "a loop": "for i in range(3):\n    T = i * i\n" + PART.format("T"),
    "with": "import contextlib\nwith contextlib.nullcontext(7) as A: pass\n" + PART.format("A"),
    "a metaclass": "class M(type):\n    pass\nPart = M('Part', (), {'value': lambda self: 5})\n",
    "training": "import attnlm\n" + PART.format("1") + "run = attnlm.__version__\n"
    "if __name__ == '__main__':\n    attnlm.train(attention=Part)\n",
    "within a function": "def f():\n    class Part:\n        def value(self): return 3\n"
    "    return Part\nPart = f()\n",
    "within a class": "class Outer:\n    class Part:\n        def value(self): return 3\n"
    "Part = Outer.Part\n",
    "a global": "A = 0\ndef f():\n    global A\n    A += 1\n    return A\n" + PART.format("f()"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_kept_source_of_a_script_computes_the_same(name: str, tmp_path: Path) -> None:
    part = script(tmp_path, SCRIPTS[name])["Part"]
    code = passed_code(part)
    assert value(code) == part().value()
    assert b"attnlm" not in code.content()
    assert (code, code.load()) == ("part.py:Part", part)


NOTEBOOKS: dict[str, list[str]] = {
    "annotations": ["A = 1", "from __future__ import annotations\nclass Part:\n    x: Unknown = A\n"
        "    def value(self): return self.x", "from __future__ import annotations"],
    "the last counts": ["def f(): return 1", PART.format("f()"), "def f(): return 2"],
    "an old base": ["class A:\n    x = 1", "class Part(A):\n    def value(self): return self.x",
                    "class A:\n    x = 2"],
    "an old constant": ["S = 1", "T = 2 * S", "S = 5", PART.format("(S, T)")],
    "counted twice": ["A = 1", "A += 1", "A += 1", PART.format("A")],
    "magics": ["get_ipython().run_line_magic('timeit', 'A')\nA = 1", "x = get_ipython()",
               "await something", "%%bad", PART.format("A")],
    "a cell that failed": ["A = 1", "A = 2\n1 / 0", PART.format("A")],
    "training": ["import attnlm\nA = 1", PART.format("A"), "v = attnlm.__version__; B = 2"],
}  # fmt: skip


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_kept_source_of_a_notebook_computes_the_same(name: str) -> None:
    part = notebook(*NOTEBOOKS[name])["Part"]
    assert value(passed_code(part)) == part().value()


def test_a_notebook_that_is_run_again_keeps_the_same_source() -> None:
    cells = ["import math\nA = 1", "def f(): return A", PART.format("f()")]
    kept = {
        passed_code(notebook(*ran)["Part"]).sha256
        for ran in (cells, [*cells, *cells], [*cells, cells[-1], "import attnlm", "B = 2"])
    }
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exec('class Part: pass')\n", "assignment without attnlm sets Part"),
        (PART.format("1") + "Old = Part\n" + PART.format("2") + "Part = Old\nclass New: pass\n"
         "Part.__name__ = Part.__qualname__ = 'New'\n", "New is nothing or another"),
        ("import attnlm\nV = attnlm.__version__\n" + PART.format("V"), "sets V"),
        ("from math import *\n" + PART.format("floor(pi)"), "sets floor"),
        ("def g():\n    global A\n    A = 1\ng()\n" + PART.format("A"), "sets A"),
    ],
)  # fmt: skip
def test_source_that_is_not_whole_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(AttnlmError) as refused:
        passed_code(script(tmp_path, text)["Part"])
    assert says in str(refused.value.message)
    assert "file" in refused.value.hint or "move what it needs" in refused.value.hint


def test_a_class_that_is_in_no_file_is_refused() -> None:
    module = sys.modules["typed"] = ModuleType("typed")
    exec(PART.format("1"), vars(module))
    with pytest.raises(UsageError, match="the source of Part cannot be kept by itself"):
        passed_code(vars(module)["Part"])
