"""The course in docs/learn.md: its commands run, and its answers are what they print."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.see.heads import study_heads
from tests.command import attnlm as command
from tests.command import here

PAGE = (Path(__file__).parent.parent / "docs" / "learn.md").read_text(encoding="utf-8")
TALES = " ".join(re.sub(r"\[[^]]*\d[^]]*\](?!\()", "", PAGE).split())
TEXT = "To be, or not to be"


def commands() -> list[list[str]]:
    """The course's commands in order, without what follows a pipe."""
    lines = re.findall(r"^\$ attnlm (.*)$", PAGE, flags=re.MULTILINE)
    return [shlex.split(line.partition("|")[0]) for line in lines]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all steps were made."""
    folder = tmp_path_factory.mktemp("course")
    for words in commands():
        command(*words, cwd=folder)
    return folder


def run(course: Path, name: str) -> attnlm.Run:
    return attnlm.open_run(name, checkpoint_dir=course / "checkpoints")


def near(pattern: str, *measured: float, within: float = 0.02) -> None:
    """The numbers that the course gives for `tales` are what was measured."""
    (found,) = re.findall(pattern, TALES)
    given = [float(number) for number in ([found] if isinstance(found, str) else found)]
    np.testing.assert_allclose(given, measured, atol=within)


@pytest.mark.slow
@pytest.mark.timeout(900)  # all steps of the course: two minutes on an idle machine
def test_the_answers_are_what_the_steps_show(course: Path) -> None:
    def loss(name: str) -> float:
        result = run(course, name).result()
        assert result is not None
        return float(result.best["val_loss"])

    def attention(name: str, text: str = TEXT) -> Any:
        return attnlm.attend(name, text, checkpoint_dir=course / "checkpoints").weights[0]

    dataset = attnlm.open_dataset("tales-char", data_dir=course / "data")
    near(r"ln 58 = ([\d.]+)", np.log(dataset.vocab_size))
    near(r"costs ([\d.]+) \. The floor", dataset.bigram_loss or 0)
    near(r"The floor, ([\d.]+),", dataset.floor or 0)
    near(r"where it ends: 4.06, then ([\d.]+) ", loss("bigram"))
    assert abs(loss("bigram") - (dataset.bigram_loss or 0)) < 0.01

    near(r"then thirds. The loss is ([\d.]+)", loss("average"))
    assert loss("average") > loss("bigram")
    near(r"19 characters has ([\d.]+)", attention("average")[0, -1, -1], within=0.005)

    near(r"Then at the loss: ([\d.]+)", loss("dot-product"))
    o = attention("dot-product")[0, 11, [11, 7, 1]]
    near(r"gives ([\d.]+) to itself, ([\d.]+) and ([\d.]+) to two other o", *o, within=0.1)
    assert o.sum() > 0.9

    near(r"softmax, mix. The loss is ([\d.]+)", loss("one-head"), within=0.03)
    e = attention("one-head", "To be")[0, -1]
    rest = 1 - e[-1] - e[-2]
    near(r"([\d.]+) to the b, ([\d.]+) to itself, ([\d.]+) to", e[-2], e[-1], rest, within=0.1)

    near(r"23,866. The loss is ([\d.]+)", loss("four-heads"), within=0.05)
    report = study_heads(run(course, "four-heads"), ablate=True, data_dir=course / "data")
    before = [head.scores["previous-token"] for head in report.heads]
    costs = [head.loss_change or 0 for head in report.heads]
    looks_back = int(np.argmax(before))
    near(r"head 4, with ([\d.]+);", before[looks_back], within=0.05)
    near(r"the loss rises by ([\d.]+)\. Each", costs[looks_back], within=0.2)
    near(r"as much, from ([\d.]+) to ([\d.]+):", min(costs), max(costs), within=0.2)
    assert int(np.argmax(costs)) == 2  # as docs/teach.md says

    one, four, wide = (loss(f"width-{name}") for name in ("single-head", "multi-head", "wide-head"))
    near(r"Answer: ([\d.]+) nats over four", four - wide)
    near(r"\(([\d.]+) after ([\d.]+)\)", wide, four, within=0.05)
    near(r"one head to four gained ([\d.]+)", one - four, within=0.05)

    parts = json.loads(command("ladder", "--resume", "parts", "--json", cwd=course).stdout)["rungs"]
    losses = [part["val_loss"] for part in parts]
    pattern = (
        r"loss\": ([\d.]+) with all parts; ([\d.]+) without positions, ([\d.]+) without the MLP, "
        r"([\d.]+) without norms"
    )
    near(pattern, *losses, within=0.03)
    assert max(losses) == losses[1]

    said = command(*next(words for words in commands() if "--show-probs" in words), cwd=course)
    lines = [line.split("\t")[:2] for line in said.stdout.splitlines()]
    # Rounding decides which words are drawn, so the text may be another than in the course.
    after_space = [previous == "␣" for (previous, _), _ in itertools.pairwise(lines)]
    shares = np.array([float(share) for _, share in lines[1:]])
    first, others = shares[after_space], shares[~np.array(after_space)]
    assert np.median(first) < 0.7 and np.median(others) > 0.95

    page = (course / "page.html").read_text(encoding="utf-8")
    assert all(f'"name":"{name}"' in page for name in ("bigram", "one-head", "four-heads", "deep"))


def test_the_commands_of_the_lesson_exist() -> None:
    lesson = (Path(__file__).parent.parent / "docs" / "teach.md").read_text(encoding="utf-8")
    named = {words[0] for words in commands()}
    named |= {words.split()[0] for words in re.findall(r"attnlm (\w[^`\n]*)", lesson)}
    for name in named:
        assert here([name, "--help"]).code == 0, name
