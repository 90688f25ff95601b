"""What a run records is what trains: source and state of own code, before step 1 and later."""

from __future__ import annotations

import decimal
import importlib
import math
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.own_code import OwnCodeError
from attnlm.compute.device import Device
from attnlm.config.settings import resolve_new
from attnlm.training.recorded import _OPENERS, check_recorded
from attnlm.training.state import initial_state

CPU = Device("cpu", "float32", "")

SOURCE = """import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

STATE = {"count": 0}


class Part(nn.Module):
    scale = 1.0

    def __init__(self, embed_dim, block_size):
        super().__init__()
        self.map = nn.Linear(embed_dim, embed_dim)
        INIT

    def forward(self, x):
        y = self.map(x)
        BODY
        return y
"""
BUFFER = "self.register_buffer('seen'"
ATTRIBUTE = "blocks.0.attention.module.seen differs"
SPARSE = "y = (self.seen @ y.flatten(0, 1).T).T.view_as(y)"
OPENS = "something else when another process opens its run$"
COUNTS = "if self.training: {}\ny = y + self.seen.sum()"


def check(tmp_path: Path, init: str, body: str = "", **settings: Any) -> None:
    source = SOURCE.replace("INIT", init.replace("\n", "\n        "))
    source = source.replace("BODY", body.replace("\n", "\n        "))
    (tmp_path / "mine.py").write_text(source)
    sizes = {"embed_dim": 8, "block_size": 6, "seed": 3, "threads": 1}
    config = resolve_new(
        {"attention": f"{tmp_path}/mine.py:Part", **sizes, **settings}, None
    ).config
    check_recorded(config, initial_state(config, 7, CPU).model, CPU)


TYPES = (
    *("float16", "bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_buffer_of_any_type_is_recorded(dtype: str, tmp_path: Path) -> None:
    init = f"self.register_buffer('seen', (9 * torch.rand(3, 2)).to(torch.{dtype}))"
    body = "y = y + torch.view_as_real(self.seen.cfloat()).sum()"
    if "8_e" in dtype or dtype.startswith("uint"):
        body = "y = y + self.seen.float().sum()"
    check(tmp_path, init, body)


@pytest.mark.parametrize(
    ("init", "body"),
    [
        ("self.register_buffer('seen', torch.zeros(()))", COUNTS.format("self.seen += 1")),
        ("self.register_buffer('seen', torch.zeros(2).bool())",
         COUNTS.format("self.seen = ~self.seen")),
        ("self.register_buffer('seen', torch.zeros(1).half())",
         COUNTS.format("self.seen = self.seen + 1")),
        ("self.register_buffer('seen', torch.zeros(1).expand(3))",
         COUNTS.format("self.seen = self.seen + torch.arange(3)")),
        ("self.register_buffer('seen', torch.rand(8, 8).T)", "y = y @ self.seen"),
        ("self.register_buffer('seen', torch.rand(8, 6).bfloat16().T[1:])",
         "y = y @ self.seen[:, :6].float().repeat(2, 2)[:8, :8]"),
        ("self.register_buffer('seen', torch.randn(3, dtype=torch.cfloat).conj())",
         "y = y + self.seen.imag.sum()"),
        ("self.register_buffer('seen', torch.ones(2))\nself.same = self.seen",
         "if self.training: self.seen.add_(1)\ny = y + self.same.sum()"),
        ("self.register_buffer('mask', None, persistent=False)",
         "if self.mask is None: self.mask = torch.ones(6, 6).tril()\n"
         "y = self.mask[:x.size(1), :x.size(1)] @ y"),
        ("self.g = nn.Parameter(torch.ones(1))",
         "with torch.no_grad(): self.g.clamp_(0.5, 2)\ny = y * self.g"),
        ("self.map = nn.utils.parametrizations.weight_norm(self.map)", ""),
        ("self.register_buffer('seen', torch.eye(8).to_sparse(), persistent=False)", SPARSE),
        ("self.maps = []", "self.maps.append(y); self.last = y"),
        ("", "y = y + 0.1 * self.training * random.random() * np.random.rand()"),
        ("", "y = nn.functional.dropout(y, 0.5, self.training)"),
    ],
)  # fmt: skip
def test_state_that_is_recorded_whole_is_trained(init: str, body: str, tmp_path: Path) -> None:
    check(tmp_path, init, body)


@pytest.mark.parametrize(
    ("init", "body", "says"),
    [
        (f"{BUFFER}, torch.zeros(()), persistent=False)", COUNTS.format("self.seen += 1"),
         ATTRIBUTE),
        (f"{BUFFER}, torch.randn(3), persistent=False)", "y = y + self.seen.sum()",
         ATTRIBUTE),
        ("self.seen = torch.zeros(())", COUNTS.format("self.seen += 1"), ATTRIBUTE),
        ("self.seen = np.zeros(1)", COUNTS.format("self.seen += 1"), ATTRIBUTE),
        ("self.seen = [torch.zeros(())]",
         "if self.training: self.seen[0] += 1\ny = y + self.seen[0]", ATTRIBUTE),
        ("self.seen = 0", "self.seen += self.training\ny = y + self.seen", ATTRIBUTE),
        ("self.seen = random.random()", "y = y + self.seen", ATTRIBUTE),
        ("self.seen = torch.randn(())", "y = y + self.seen", ATTRIBUTE),
        ("self.g = torch.Generator().manual_seed(1)",
         "if self.training: y = y + torch.rand((), generator=self.g)", OPENS),
        ("", "STATE['count'] += 1\ny = y + STATE['count']", OPENS),
        (f"{BUFFER}, None)",
         "self.seen = torch.zeros(2) if self.seen is None else self.seen + 1\n"
         "y = y + self.seen.sum()",
         r"its checkpoint does not .*\.seen is not a tensor of this model"),
        (f"{BUFFER}, torch.zeros(1))", "self.seen = torch.cat([self.seen, self.seen])",
         r"seen is float32 \(\d+,\), not float32 \(1,\)"),
        (f"{BUFFER}, torch.zeros(1))", "self.seen = self.seen.double()",
         "seen is float64 .*, not float32"),
        ("self.register_buffer('a', torch.zeros(1))\nself.register_buffer('b', self.a)",
         "self.a = self.a + 1\ny = y + self.b", "module.b is not a tensor of this model"),
        (f"{BUFFER}, torch.eye(8).to_sparse())", SPARSE, "a checkpoint cannot hold"),
        ("self.r = len(Path(__file__).with_name('r').read_text())", "y = y + self.r",
         "cannot be opened by another process: FileNotFoundError"),
        ("self.r = len(sys.argv)", "y = y + self.r", "module.r differs"),
        ("self.r = sys.argv.index('--my-option')", "y = y + self.r", "ValueError: '--my-option'"),
        ("'--my-option' in sys.argv or sys.exit(2)", "", "another process: SystemExit: 2"),
        ("self.g = nn.Parameter(torch.ones(1))",
         "self.g.data = self.g.data.clamp(0.5, 2)\ny = y * self.g", "module.g is replaced"),
        ("self.g = nn.Parameter(torch.ones(1))",
         "if self.training: self.g = nn.Parameter(self.g.data)\ny = y * self.g",
         "module.g is replaced"),
        ("self.g = nn.Parameter(torch.ones(1))",
         "y = y * self.g; self.g.data = self.g.data.clone()", "module.g is replaced"),
        ("", "import neighbour_of_mine\ny = y + neighbour_of_mine.X", "ModuleNotFoundError"),
        ("self.turned = False",
         "if self.training: self.turned = not self.turned\ny = y * (1 + self.turned)",
         "turned differs"),
        ("", "import os\ny = y * (1 + os.getpid() % 1000)", OPENS),
        ("", "import os\ny = y * len(os.environ)", OPENS),
        ("import os\nself.elsewhere = 'MINE' not in os.environ",
         "import os\nif self.elsewhere: os._exit(3)", "another process: it ended"),
    ],
)  # fmt: skip
def test_state_that_is_not_recorded_is_refused_before_step_1(
    init: str, body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").write_text("0.5")
    (tmp_path / "neighbour_of_mine.py").write_text("X = 1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["script.py", "--my-option"])
    monkeypatch.setenv("MINE", "1")
    with pytest.raises(AttnlmError) as refused:
        check(tmp_path, init, body)
    assert re.search(says, str(refused.value)), refused.value


PASSED = SOURCE.replace("INIT", "").replace("BODY", "y = y * self.scale")


def test_a_class_that_was_changed_is_refused_and_leaves_no_run(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given.py").write_text(PASSED)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    part = importlib.import_module("given").Part
    run = train(attention=part, embed_dim=8)
    loss = run.metrics()[-1]["val_loss"]
    monkeypatch.setattr(part, "scale", 3.0)
    assert attnlm.evaluate(run, checkpoint="last").loss == loss  # it is what it was
    with pytest.raises(AttnlmError, match="computes something else"):
        train(attention=part, embed_dim=8)
    monkeypatch.undo()
    monkeypatch.setattr(part, "forward", lambda self, x: 2 * self.map(x))
    with pytest.raises(AttnlmError, match="computes something else"):
        train(attention=part, embed_dim=8)
    assert [path.name for path in run.path.parent.iterdir() if path.is_dir()] == [run.name]


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("import beside\nX = beside.X", "part.py imports beside, which is not installed"),
        ("X = sys.modules['given'].__dict__.setdefault('B', 3)", "KeyError: 'given'"),
    ],
)
def test_a_class_whose_file_needs_others_is_refused(
    first: str, says: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("X = 1\n")
    (tmp_path / "given.py").write_text(
        f"import sys\n{first}\n{PASSED.replace('self.scale', 'self.scale * X')}"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "given", raising=False)
    with pytest.raises(OwnCodeError, match=says):
        train(attention=importlib.import_module("given").Part, embed_dim=8)


@pytest.mark.parametrize(
    ("changes", "body", "says"),
    [
        ("os.environ['MINE'] = '3'", "y * float(os.environ['MINE'])", "KeyError: 'MINE'"),
        ("os.environ['MINE'] = '3'", "y * float(os.environ.get('MINE', 1))", OPENS),
        ("math.MINE = 3", "y * getattr(math, 'MINE', 1)", OPENS),
        ("nn.functional.gelu = lambda x: 3 * x", "nn.functional.gelu(y)", OPENS),
        ("torch.Tensor.half_it = lambda x: x / 2", "y.half_it()", "AttributeError: .*half_it"),
        ("decimal.DefaultContext.prec = 3", "y * decimal.DefaultContext.prec", OPENS),
    ],
)
def test_what_a_script_sets_outside_of_its_file_is_refused(
    changes: str, body: str, says: str, train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run keeps the class alone: another process would compute without a word."""
    source = SOURCE.replace("INIT", "").replace("BODY", f"y = {body}")
    (tmp_path / "given.py").write_text(f"import decimal, math, os\n{source}")
    script = "import decimal, math, os\nimport torch\nfrom torch import nn\n" + changes
    before = nn.functional.gelu, decimal.DefaultContext.prec
    try:
        exec(script, {})
        with pytest.raises(OwnCodeError, match=says.removesuffix("$")):
            train(attention=f"{tmp_path}/given.py:Part", embed_dim=8)
    finally:
        nn.functional.gelu, decimal.DefaultContext.prec = before
        os.environ.pop("MINE", None)
        vars(math).pop("MINE", None)
        if hasattr(torch.Tensor, "half_it"):
            delattr(torch.Tensor, "half_it")


def test_one_process_opens_all_runs_of_a_process(tmp_path: Path) -> None:
    check(tmp_path, "")
    openers = dict(_OPENERS)
    check(tmp_path, "print('noise', flush=True)", "print('more', flush=True)")
    check(tmp_path, "nn.mine = 1")  # and does nothing else
    with pytest.raises(OwnCodeError, match="AttributeError"):
        check(tmp_path, "", "y = y * nn.mine")
    assert openers == _OPENERS and all(o.poll() is None for o in openers.values())


def test_what_is_made_in_evaluation_is_used_in_training(train: Any, tmp_path: Path) -> None:
    source = SOURCE.replace("INIT", BUFFER + ", None, persistent=False)").replace(
        "BODY",
        "if self.seen is None: self.seen = torch.ones(12, 12).tril()\n"
        "        T = x.size(1); y = self.seen[:T, :T] @ y",
    )
    (tmp_path / "mine.py").write_text(source)
    run = train(attention=f"{tmp_path}/mine.py:Part", embed_dim=8)
    assert attnlm.evaluate(run, checkpoint="last").loss == run.metrics()[-1]["val_loss"]


@pytest.mark.parametrize(("after", "evaluated"), [(7, 0), (14, 1), (34, 4)])
def test_state_that_a_later_step_changes_is_refused_at_an_evaluation(
    after: int, evaluated: int, train: Any, tmp_path: Path
) -> None:
    source = SOURCE.replace("INIT", "self.calls = 0").replace(
        "BODY", f"self.calls += torch.is_grad_enabled(); y = y * (1 + (self.calls > {after}))"
    )
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(AttnlmError, match=r"calls differs"):
        train(attention=f"{tmp_path}/mine.py:Part", embed_dim=8, steps=35, eval_every=7, name="a")
    steps = [e.step for e in attnlm.open_run(tmp_path / "checkpoints" / "a").evaluations()]
    assert steps == [0, 7, 14, 21, 28][: evaluated + 1]


def test_the_weights_that_a_run_starts_from_are_compared_before_step_1(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE.replace("INIT", "self.g = nn.Parameter(torch.ones(1))").replace(
        "BODY", "y = y * (self.g + (self.g != 1) * ('--my-option' in sys.argv))"
    )
    (tmp_path / "mine.py").write_text(source)
    parent = train(attention=f"{tmp_path}/mine.py:Part", embed_dim=8)
    monkeypatch.setattr(sys, "argv", ["script.py", "--my-option"])
    with pytest.raises(OwnCodeError, match="computes something else"):
        train(start_from=parent, name="child")
    assert not (parent.path.parent / "child").exists()


def test_the_comparison_changes_nothing(tmp_path: Path) -> None:
    source = SOURCE.replace("INIT", BUFFER + ", torch.zeros(1))").replace(
        "BODY", "self.seen = self.seen + torch.rand(1); y = y + self.seen"
    )
    (tmp_path / "mine.py").write_text(source)
    sizes: dict[str, Any] = {"embed_dim": 8, "block_size": 6, "seed": 3, "threads": 1}
    config = resolve_new({"attention": f"{tmp_path}/mine.py:Part", **sizes}, None).config
    model = initial_state(config, 7, CPU).model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    check_recorded(config, model, CPU)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model.training and torch.get_rng_state().equal(states[0])
    assert (random.getstate(), repr(np.random.get_state())) == states[1:]


def test_check_says_what_is_not_recorded(tmp_path: Path) -> None:
    source = SOURCE.replace("INIT", "self.seen = torch.randn(3)")
    (tmp_path / "mine.py").write_text(source.replace("BODY", "y = y + self.seen.sum()"))
    findings = {f.name: f for f in attnlm.check(f"{tmp_path}/mine.py:Part", embed_dim=8)}
    assert ATTRIBUTE in findings["recorded"].text and findings["recorded"].is_fatal


ORDER = "sum(i * ord(c) for i, c in enumerate({}))"


@pytest.mark.parametrize(
    ("init", "body"),
    [
        ("self.seen = " + ORDER.format("set('abcdefghijklmnopqrstuvwxyz')"), "y = y * self.seen"),
        ("", "y = y * " + ORDER.format("{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j'}")),
        ("", "y = y * (hash('causal') % 1000)"),
    ],
)
def test_code_that_is_another_in_the_next_process_is_refused(
    init: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttnlmError, match="something else") as refused:
        check(tmp_path, init, body)
    assert "sorted(" in refused.value.hint


@pytest.mark.parametrize(
    "expression",
    [
        "sorted({'a', 'b', 'c'}).index('b')",
        "len({'a', 'b'} & {'b'})",
        "('a' in {'a', 'b'}) + (type(self) not in {int, str})",
    ],
)
def test_a_set_that_has_an_order_or_needs_none_is_trained(expression: str, tmp_path: Path) -> None:
    check(tmp_path, "", f"y = y * {expression}")
