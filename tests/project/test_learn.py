"""docs/learn.md and docs/teach.md: their commands run, and their answers are what they print."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.model.recorder import record
from attnlm.runs.load_model import load_model
from attnlm.see.heads import HeadsReport
from attnlm.see.heads import heads as study_heads
from tests.kit import command, try_command

DOCS = Path(__file__).parents[2] / "docs"
COURSE, LESSON = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("learn", "teach"))
PLAIN = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", COURSE)  # without the addresses of links
TALES = " ".join(re.sub(r"\[[^]]*\d[^]]*\]", "", PLAIN).split())
ANSWERS = " ".join(LESSON.split())
TEXT = "To be, or not to be"
TWO = ("one-head", "four-heads")


(HEAD,) = re.findall(r"^```python\n(.*?)^```$", COURSE, flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """The commands of a page in order, without what follows a pipe."""
    lines = re.findall(r"^\$ attnlm (.*)$", page, flags=re.MULTILINE)
    return [shlex.split(line.partition(" | ")[0]) for line in lines]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all steps of the course were made."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "distance.py").write_text(HEAD)
    for words in commands(COURSE):
        command(*words, cwd=folder)
    return folder


def run(course: Path, name: str) -> attnlm.Run:
    return attnlm.open_run(name, checkpoint_dir=course / "checkpoints")


def loss(course: Path, name: str) -> float:
    result = run(course, name).result()
    assert result is not None
    return result.best.val_loss


def attention(course: Path, name: str, text: str = TEXT) -> Any:
    return attnlm.attend(name, text, checkpoint_dir=course / "checkpoints").weights[0]


def near(pattern: str, *measured: float, page: str = TALES) -> None:
    """The numbers that a page gives are those measured, to one unit of their last digit."""
    (found,) = re.findall(pattern, page)
    given = [found] if isinstance(found, str) else [*found]
    assert len(given) == len(measured)
    for number, wanted in zip(given, measured, strict=True):
        unit = 10.0 ** -len(number.partition(".")[2])
        assert abs(float(number) - wanted) <= unit, (pattern, number, wanted)


@pytest.fixture(scope="module")
def four_heads(course: Path) -> HeadsReport:
    """Return the output of `heads` in step 5."""
    found = study_heads(
        run(course, "four-heads"), ablate=True, windows=2000, data_dir=course / "data"
    )
    assert found.measures_all
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all steps of the course: two minutes on an idle machine
def test_the_answers_are_what_the_steps_show(course: Path, four_heads: HeadsReport) -> None:
    dataset = attnlm.open_dataset("tales-char", data_dir=course / "data")
    near(r"ln 58 = ([\d.]+)", np.log(dataset.vocab_size))
    near(r"text costs ([\d.]+) \. The floor", dataset.bigram_loss or 0)
    near(r"The floor, ([\d.]+),", dataset.floor or 0)
    near(r"where it ends: 4.06, then ([\d.]+) ", loss(course, "bigram"))
    assert abs(loss(course, "bigram") - (dataset.bigram_loss or 0)) < 0.01

    near(r"weights as shades. The loss is ([\d.]+)", loss(course, "average"))
    assert loss(course, "average") > loss(course, "bigram")
    near(r"19 characters has ([\d.]+)", attention(course, "average")[0, -1, -1])

    near(r"Then at the loss: ([\d.]+)", loss(course, "dot-product"))
    o = attention(course, "dot-product")[0, 11, [11, 7, 1]]
    near(r"gives ([\d.]+) to itself, ([\d.]+) and ([\d.]+) to two other o", *o)

    near(r"loss of the model is ([\d.]+)", loss(course, "one-head"))
    e = attention(course, "one-head", "To be")[0, -1]
    near(r"([\d.]+) to the b, ([\d.]+) to itself, ([\d.]+) to", e[-2], e[-1], 1 - e[-1] - e[-2])

    near(r"23,866. The loss is ([\d.]+)", loss(course, "four-heads"))
    assert four_heads.loss == pytest.approx(loss(course, "four-heads"), abs=0.002)
    before = [head.scores["previous-token"] for head in four_heads.heads]
    costs = [head.loss_change or 0 for head in four_heads.heads]
    assert int(np.argmax(before)) == 3
    near(r"Head 4, with ([\d.]+); without it the loss rises by ([\d.]+)\. Ea", before[3], costs[3])
    ((low, high),) = re.findall(r"costs between ([\d.]+) and ([\d.]+):", TALES)
    assert float(low) <= min(costs) and max(costs) <= float(high)
    assert float(high) - float(low) <= 0.4

    one, four, wide = (
        loss(course, f"width-{name}") for name in ("single-head", "multi-head", "wide-head")
    )
    near(r"gain ([\d.]+) nats over four", four - wide)
    near(r"\(([\d.]+) after ([\d.]+)\)", wide, four)
    near(r"one head to four gained ([\d.]+)", one - four)
    parameters = [run(course, f"width-{name}").parameters for name in ("multi-head", "wide-head")]
    assert round(parameters[1] / parameters[0]) == 3
    assert ranked(course, "width") == ["multi-head and wide-head"]

    parts = json.loads(command("ladder", "--resume", "parts", "--json", cwd=course).stdout)["rungs"]
    pattern = (
        r"loss\": ([\d.]+) with all parts; ([\d.]+) without positions, ([\d.]+) without the MLP, "
        r"([\d.]+) without norms"
    )
    losses = [part["val_loss"] for part in parts]
    near(pattern, *losses)
    assert max(losses) == losses[1]
    assert ranked(course, "parts") == ["transformer and transformer:norm=none"]

    near(r"The loss is ([\d.]+), about twice", loss(course, "deep"))
    said = command(
        *next(words for words in commands(COURSE) if "--show-probs" in words), cwd=course
    )
    lines = [line.split("\t")[:2] for line in said.stdout.splitlines()]
    # Rounding decides which words are drawn, so the text may be another than in the course.
    after_space = [previous == "␣" for (previous, _), _ in itertools.pairwise(lines)]
    shares = np.array([float(share) for _, share in lines[1:]])
    first, others = shares[after_space], shares[~np.array(after_space)]
    assert np.median(first) < 0.7 and np.median(others) > 0.95

    near(r"them. The loss is ([\d.]+): better", loss(course, "distance"))
    near(r"a loss between ([\d.]+), one head, and ([\d.]+), four", *map(partial(loss, course), TWO))
    near(r"gain beyond that, ([\d.]+),", loss(course, "distance") - loss(course, "four-heads"))
    heads = study_heads(run(course, "distance"), data_dir=course / "data").heads
    strongest = {max(head.scores, key=head.scores.__getitem__) for head in heads}
    assert {"previous-token", "same-token"} <= strongest

    page = (course / "page.html").read_text(encoding="utf-8")
    assert all(f'"name":"{name}"' in page for name in ("bigram", "one-head", "four-heads", "deep"))


def ranked(course: Path, ladder: str) -> list[str]:
    """The pairs of rungs that the ladder warns not to rank."""
    said = json.loads(command("ladder", "--resume", ladder, "--json", cwd=course).stdout)
    return re.findall(r"too few steps to rank (.+?): ", "\n".join(said["warnings"]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_words_of_each_rung_are_right_as_often_as_the_course_says(course: Path) -> None:
    dataset = attnlm.open_dataset("tales-char", data_dir=course / "data")
    known = set(re.findall(r"[A-Za-z]+", dataset.tokenizer.decode(dataset.train)))

    def share(name: str) -> float:
        written = "".join(attnlm.sample(run(course, name), prompt="Once ", tokens=5000, seed=1))
        words = re.findall(r"[A-Za-z]+", written)
        return len([word for word in words if word in known]) / len(words)

    for name, words, least, most in (
        ("bigram", "about one word in ten is a word of the stories", 0.05, 0.17),
        ("average", "hardly a word", 0, 0.1),
        ("dot-product", "about one word in ten again", 0.05, 0.17),
        ("one-head", "About one word in five is right", 0.17, 0.28),
        ("four-heads", "About two words in three are right", 0.55, 0.8),
        ("deep", "Nearly every word is right", 0.97, 1),
    ):
        assert words in TALES and least <= share(name) <= most, name


def names(page: str) -> list[str]:
    """The names that a page gives to runs, ladders and files."""
    given = [words[words.index("--name") + 1] for words in commands(page) if "--name" in words]
    return given + [word for words in commands(page) for word in words if word.endswith(".html")]


def test_both_pages_use_names_of_their_own_and_only_runs_that_they_made() -> None:
    assert not set(names(COURSE)) & set(names(LESSON))
    for page in (COURSE, LESSON):
        assert len(set(names(page))) == len(names(page))
        made: set[str] = set()
        for words in commands(page):
            if words[0] in ("sample", "report", "export", "heads"):
                runs = itertools.takewhile(lambda word: not word.startswith("--"), words[1:])
                assert {word for word in runs if not word.endswith(".html")} <= made, words
            if "--name" in words:
                made.add(words[words.index("--name") + 1])


def test_the_pages_have_the_buttons_and_titles_that_the_lesson_names() -> None:
    folder = DOCS.parent / "src" / "attnlm" / "see" / "pages"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in folder.iterdir())
    named = set(re.findall(r'"([A-Z][^"]+)"', LESSON)) - {"Once there was a littl"}
    assert {"Next step", "The way through one head", "Switch this head off"} <= named
    for words in {*named, "Full screen, large type", "Generate"}:
        assert words.rstrip(" …") in sources, words


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_answers_of_the_lesson_hold(course: Path, four_heads: HeadsReport) -> None:
    trained: dict[str, str] = {}  # names in the course, by names in the lesson
    settings = {
        tuple(words[: words.index("--name")]): words[-1]
        for words in commands(COURSE)
        if words[0] == "train"
    }
    for words in commands(LESSON):
        if words[0] == "train":
            trained[words[-1]] = settings[tuple(words[: words.index("--name")])]

    def shares(name: str, text: str, silenced: tuple[int, int] | None = None) -> dict[str, float]:
        opened = run(course, trained[f"lesson-{name}"])
        model, _ = load_model(opened, device="cpu")
        ids = torch.tensor([opened.tokenizer.encode(text)])
        shares_V = torch.softmax(record(model, ids, silenced).logits[0, -1], -1).tolist()
        return {opened.tokenizer.decode([i]): share for i, share in enumerate(shares_V)}

    opening = "Once there was a littl"
    assert f'next letter of "{opening}"' in LESSON and f"type `{opening}`" in LESSON
    assert shares("bigram", opening)["e"] < 0.25 and shares("four-heads", opening)["e"] > 0.9

    before = [head.scores["previous-token"] for head in four_heads.heads]
    assert int(np.argmax(before)) == 3
    near(r'"previous token" of head 4 is ([\d.]+)', before[3], page=ANSWERS)
    assert shares("four-heads", opening, (0, 0))["e"] < 0.1
    assert shares("four-heads", opening, (0, 1))["e"] > 0.9
    costs = [head.loss_change or 0 for head in four_heads.heads]
    near(r"the loss rises by ([\d.]+) to ([\d.]+),", min(costs), max(costs), page=ANSWERS)
    assert int(np.argmax(costs)) == 2

    for name in ("bigram", "average", "one-head", "four-heads"):
        tale, late = (np.array([*shares(name, text).values()]) for text in ("tale", "late"))
        assert (abs(tale - late).max() < 1e-6) == (name in ("bigram", "average")), name

    sure = shares("four-heads", "the bridg")["e"], max(shares("four-heads", "the ").values())
    pattern = r"gives (\d+)% to `e`.* more than (\d+)% in `lesson-four-heads`"
    near(pattern, *(100 * share for share in sure), page=ANSWERS)
    assert shares("deep", "the k")["i"] > 0.95 and max(shares("deep", "said ").values()) < 0.2


def test_the_head_of_the_exercise_scores_by_distance_only(project: Path) -> None:
    (project / "distance.py").write_text(HEAD)
    words = next(words for words in commands(COURSE) if "distance.py:Distance" in words[1])
    said = json.loads(command(*words, "--block-size", 8, "--json", cwd=project).stdout)["findings"]
    remedies = {finding["name"]: finding["remedy"] for finding in said if finding["remedy"]}
    assert remedies.keys() == {"gradients"}
    assert "query.weight" in remedies["gradients"] and "key.weight" in remedies["gradients"]
    words = next(words for words in commands(COURSE) if "--scores" in words)
    command(*words, "--steps", 2, "--block-size", 8, cwd=project)
    weights = attnlm.attend("distance", "apples", checkpoint_dir=project / "checkpoints").weights
    itself, before = (np.diagonal(weights[0], -back, 1, 2) for back in (0, 1))
    ratios = itself[:, 1:] / before
    np.testing.assert_allclose(ratios, ratios[:, :1].repeat(ratios.shape[1], 1), rtol=1e-4)


def test_the_commands_within_the_sentences_of_the_lesson_exist() -> None:
    for name in {words.split()[0] for words in re.findall(r"`attnlm (\w[^`\n]*)`", LESSON)}:
        assert try_command([name, "--help"]).code == 0, name
