"""An accepted file is no licence to call anything in it: only what was accepted is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.files import read_json, write_json
from attnlm.base.own_code import CodeNotAcceptedError
from attnlm.data.dataset import Dataset
from tests import own_code

MINE = """from torch import nn
from torch.nn import Linear


class Head(nn.Module):
    def __init__(self, embed_dim, path="t.txt", text=""):
        super().__init__()
        self.map = nn.Linear(embed_dim, embed_dim)
        if text:
            open(path, "w").write(text)

    def forward(self, x):
        return self.map(x)


class Other(Head):
    pass


class Plain:
    pass


def dump(embed_dim, path="t.txt", text="x"):
    return Head(embed_dim, path, text)
"""


@pytest.fixture
def run(dataset: Dataset, tmp_path: Path) -> attnlm.Run:
    (tmp_path / "mine.py").write_text(MINE)
    code = f"{tmp_path / 'mine.py'}:Head"
    folder = tmp_path / "checkpoints"
    return attnlm.train(dataset, attention=code, checkpoint_dir=folder, **own_code.SMALL)


def forge(run: attnlm.Run, **settings: Any) -> None:
    """Change the settings in config.json, with a hash that fits."""
    path = run.path / "config.json"
    content = read_json(path)
    content["config"] |= settings
    write_json(path, content)


@pytest.mark.parametrize(
    "forged",
    [
        {"attention": "mine.py:dump"},
        {"attention": "mine.py:Other"},
        {"attention": "mine.py:Linear"},
        {"attention": "mine.py:Plain"},
        {"set.text": "theirs"},
        {"set.path": "u.txt", "set.text": "theirs"},
        {"loss": "mine.py:dump"},
    ],
    ids=str,
)
def test_a_forged_run_calls_nothing_but_what_was_trained(
    forged: dict[str, str], run: attnlm.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own_code.become_a_new_process(monkeypatch)
    attnlm.evaluate(run)
    own_code.become_a_new_process(monkeypatch)
    forge(run, **forged)
    with pytest.raises(attnlm.AttnlmError, match=r"not trained|has no argument"):
        attnlm.train(resume=run.path, steps=6)
    assert not list(tmp_path.glob("*.txt"))


def test_a_function_of_an_accepted_file_is_called_only_after_its_name_is_accepted_too(
    run: attnlm.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forge(run, attention="mine.py:dump")
    own_code.become_another_user(monkeypatch, tmp_path)
    attnlm.accept_code(run.path / "code" / "mine.py")
    with pytest.raises(CodeNotAcceptedError, match="calls dump of") as caught:
        attnlm.evaluate(run.path)
    assert caught.value.accepts.endswith("mine.py:dump")
    attnlm.accept_code(caught.value.accepts)
    own_code.become_a_new_process(monkeypatch)
    attnlm.evaluate(run.path)


def test_modules_of_an_accepted_file_are_called_with_any_arguments(
    run: attnlm.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(run, attention="mine.py:Other", **{"set.path": "elsewhere"})
    own_code.become_another_user(monkeypatch, tmp_path)
    with pytest.raises(CodeNotAcceptedError):
        attnlm.evaluate(run.path)
    attnlm.accept_code(run.path / "code" / "mine.py")
    attnlm.evaluate(run.path)
