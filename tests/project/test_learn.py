"""docs/learn.md and docs/teach.md: their commands run, and their answers are what they print."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

import attnlm
from docs import course as steps
from tests.kit import command, try_command
from tests.project.documents import ROOT, shown_in, text_of

COURSE, LESSON = text_of("docs/learn.md"), text_of("docs/teach.md")
PAGES = [[shown.words for shown in shown_in(page)] for page in (COURSE, LESSON)]
OPENING = "Once there was a littl"
takes_all_steps = [
    pytest.mark.slow,
    pytest.mark.documents,
    pytest.mark.timeout(1800),  # two minutes on an idle machine
]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all steps of the course were made."""
    folder = tmp_path_factory.mktemp("course")
    steps.take_steps(folder)
    return folder


class TestSteps:
    """What a reader sees after the steps: figures, and what the sentences say of them."""

    pytestmark = takes_all_steps

    def test_the_figures_are_those_of_the_steps(self, course: Path) -> None:
        """But for one unit of the last digit; `python docs/generate.py --course` writes them."""
        measured = steps.measured(course)
        assert steps.FIGURE.search(COURSE) and steps.FIGURE.search(LESSON)
        assert steps.outdated(COURSE, measured) + steps.outdated(LESSON, measured) == []
        assert abs(measured["bigram"] - measured["counted-bigram"]) < 0.01
        assert measured["average"] > measured["bigram"]
        assert measured["most-cost"] - measured["least-cost"] <= 0.4
        assert measured["no-positions"] > max(measured["no-mlp"], measured["no-norm"])

    def test_the_heads_are_those_that_the_pages_name(self, course: Path) -> None:
        heads = steps.four_heads(course).heads
        before = [head.scores["previous-token"] for head in heads]
        costs = [head.loss_change or 0 for head in heads]
        assert (int(np.argmax(before)), int(np.argmax(costs))) == (3, 2)
        run = attnlm.open_run(course / "checkpoints" / "distance", data_dir=course / "data")
        scores = [head.scores for head in attnlm.heads(run).heads]
        strongest = {max(of_head, key=of_head.__getitem__) for of_head in scores}
        assert {"previous-token", "same-token"} <= strongest

    @pytest.mark.parametrize(
        ("ladder", "pair"),
        [("width", "multi-head and wide-head"), ("parts", "transformer and transformer:norm=none")],
    )
    def test_a_ladder_warns_not_to_rank_a_pair(self, course: Path, ladder: str, pair: str) -> None:
        said = "\n".join(steps.ladder(course, ladder)["warnings"])
        (found,) = re.findall(r"too few steps to rank (.+?): ", said)
        assert sorted(found.split(" and ")) == sorted(pair.split(" and "))

    def test_the_widest_heads_have_three_times_the_parameters(self, course: Path) -> None:
        narrow, wide = (
            attnlm.open_run(f"width-{model}", checkpoint_dir=course / "checkpoints").parameters
            for model in ("multi-head", "wide-head")
        )
        assert round(wide / narrow) == 3

    def test_the_model_is_least_sure_at_the_start_of_a_word(self, course: Path) -> None:
        words = next(words for words in PAGES[0] if "--show-probs" in words)
        said = command(*words, cwd=course).stdout
        lines = [line.split("\t")[:2] for line in said.splitlines()]
        # Rounding decides which words are drawn, so the text may be another than in the course.
        after_space = np.array([before == "␣" for (before, _), _ in itertools.pairwise(lines)])
        shares = np.array([float(share) for _, share in lines[1:]])
        assert np.median(shares[after_space]) < 0.7 and np.median(shares[~after_space]) > 0.95

    def test_the_page_has_the_models_of_the_course(self, course: Path) -> None:
        page = (course / "page.html").read_text(encoding="utf-8")
        for name in ("bigram", "one-head", "four-heads", "deep"):
            assert f'"name":"{name}"' in page

    @pytest.mark.parametrize(
        ("name", "least", "most"),
        [
            ("bigram", 0.05, 0.17),
            ("average", 0, 0.1),
            ("dot-product", 0.05, 0.17),
            ("one-head", 0.17, 0.28),
            ("four-heads", 0.55, 0.8),
            ("deep", 0.97, 1),
        ],
    )
    def test_words_are_right_as_often_as_the_course_says(
        self, course: Path, name: str, least: float, most: float
    ) -> None:
        dataset = attnlm.open_dataset("tales-char", data_dir=course / "data")
        known = set(re.findall(r"[A-Za-z]+", dataset.tokenizer.decode(dataset.train)))
        run = attnlm.open_run(name, checkpoint_dir=course / "checkpoints")
        written = "".join(attnlm.sample(run, prompt="Once ", tokens=5000, seed=1))
        words = re.findall(r"[A-Za-z]+", written)
        assert least <= len([word for word in words if word in known]) / len(words) <= most

    def test_the_next_letter_of_the_lessons_opening(self, course: Path) -> None:
        assert f'next letter of "{OPENING}"' in LESSON and f"type `{OPENING}`" in LESSON
        assert steps.shares(course, "bigram", OPENING)["e"] < 0.25
        assert steps.shares(course, "four-heads", OPENING)["e"] > 0.9
        assert steps.shares(course, "four-heads", OPENING, (0, 0))["e"] < 0.1
        assert steps.shares(course, "four-heads", OPENING, (0, 1))["e"] > 0.9
        assert steps.shares(course, "deep", "the k")["i"] > 0.95
        assert max(steps.shares(course, "deep", "said ").values()) < 0.2

    @pytest.mark.parametrize("name", ["bigram", "average", "one-head", "four-heads"])
    def test_models_without_scores_ignore_the_order(self, course: Path, name: str) -> None:
        tale, late = (np.array([*steps.shares(course, name, t).values()]) for t in ("tale", "late"))
        assert (abs(tale - late).max() < 1e-6) == (name in ("bigram", "average"))


def test_the_lesson_trains_as_the_course() -> None:
    course, lesson = (
        {" ".join(words[: words.index("--name")]) for words in page if words[0] == "train"}
        for page in PAGES
    )
    assert lesson <= course


def test_both_pages_use_names_of_their_own_and_only_runs_that_they_made() -> None:
    named: list[str] = []
    for page in PAGES:
        made: set[str] = set()
        for words in page:
            if words[0] in ("sample", "report", "export", "heads"):
                runs = itertools.takewhile(lambda word: not word.startswith("--"), words[1:])
                assert {word for word in runs if not word.endswith(".html")} <= made, words
            if "--name" in words:
                made.add(words[words.index("--name") + 1])
                named.append(words[words.index("--name") + 1])
            named += [word for word in words if word.endswith(".html")]
    assert len(set(named)) == len(named)


def test_the_pages_have_the_buttons_titles_and_commands_that_the_lesson_names() -> None:
    folder = ROOT / "src" / "attnlm" / "see" / "pages"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in folder.iterdir())
    named = set(re.findall(r'"([A-Z][^"]+)"', LESSON)) - {OPENING}
    assert {"Next step", "The way through one head", "Switch this head off"} <= named
    for words in {*named, "Full screen, large type", "Generate"}:
        assert words.rstrip(" …") in sources, words
    for name in {words.split()[0] for words in re.findall(r"`attnlm (\w[^`\n]*)`", LESSON)}:
        assert try_command([name, "--help"]).code == 0, name


@pytest.mark.documents
def test_the_head_of_the_exercise_scores_by_distance_only(project: Path) -> None:
    (project / "distance.py").write_text(steps.HEAD)
    (check,) = (words for words in PAGES[0] if words[0] == "check")
    (train,) = (words for words in PAGES[0] if "--scores" in words)
    said = json.loads(command(*check, "--block-size", 8, "--json", cwd=project).stdout)["findings"]
    remedies = {finding["name"]: finding["remedy"] for finding in said if finding["remedy"]}
    assert remedies.keys() == {"gradients"}
    assert "query.weight" in remedies["gradients"] and "key.weight" in remedies["gradients"]
    command(*train, "--steps", 2, "--block-size", 8, cwd=project)
    weights = attnlm.attend("apples", project / "checkpoints" / "distance").weights
    itself, before = (np.diagonal(weights[0], -back, 1, 2) for back in (0, 1))
    ratios = itself[:, 1:] / before
    np.testing.assert_allclose(ratios, ratios[:, :1].repeat(ratios.shape[1], 1), rtol=1e-4)
