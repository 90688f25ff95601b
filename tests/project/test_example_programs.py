"""The examples of own code: each is causal, trains, and is short enough for a lecture."""

from __future__ import annotations

import ast
import json
import math
import shlex
from pathlib import Path

import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from tests.kit import command

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALL = ("--steps", 20, "--batch-size", 4, "--block-size", 16, "--eval-tokens", 64, "--seed", 1)
HEADS = dict.fromkeys(("alibi", "echo", "lecture", "temperature"), 4)
"""The heads of the examples in which maps are observed."""


def commands(path: Path) -> list[list[str]]:
    """Return the commands in the docstring of an example, with absolute paths."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    lines = [shlex.split(line) for line in docstring.splitlines() if " attnlm " in f" {line}"]
    return [[str(ROOT / w) if ".py:" in w else w for w in words[1:]] for words in lines]


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_holds_and_its_commands_run(path: Path, project: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    check, train = commands(path)
    assert (check[0], train[0]) == ("check", "train")
    said = command(*check, "--block-size", 16, "--json", cwd=project).stdout
    found = {finding["name"]: finding for finding in json.loads(said)["findings"]}
    assert [name for name, finding in found.items() if finding["remedy"]] == []
    assert found["causality"]["text"] == "logits depend on no later token"
    got, wanted = found["gradients"]["text"].split()[0:3:2]
    assert got == wanted

    command(*train, *SMALL, "--name", path.stem, cwd=project)
    run = attnlm.open_run(path.stem, checkpoint_dir=project / "checkpoints")
    result = run.result()
    assert result is not None and result.last.val_loss < math.log(run.tokenizer.vocab_size)
    assert [file.read_bytes() for file in (run.path / "code").iterdir()] == [path.read_bytes()]
    assert len(command("sample", path.stem, "--tokens", 30, cwd=project).stdout) > 20

    pair = "3 apples an", "4 pears are", "a", "s"
    if path.stem in HEADS:
        steps = attnlm.heads_over_training(run).scores["induction"]
        assert steps.shape == (13, 1, 4)  # eleven evaluations, and steps 1 and 3
        assert attnlm.patch(run, [pair]).heads.shape == (1, 4)
    elif path.stem == "gru":
        with pytest.raises(AttnlmError, match="nothing to patch"):
            attnlm.patch(run, [pair])
    else:
        assert attnlm.patch(run, [pair]).attention.shape == (1, len(pair[0]))
        with pytest.raises(AttnlmError, match="no snapshots with scores"):
            attnlm.heads_over_training(run)
