"""The exam: a candidate beside the standard model, task by task."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.runs import exam_plan
from attnlm.runs.exam_plan import SUITE, Exercise
from attnlm.see.exam_card import TaskResult, judged
from attnlm.see.verdicts import compare_by_task
from attnlm.workflows.check_own_code import NotCausalError
from tests.browser import check_fits
from tests.kit import command, try_command

FAILS_IN_SORT = """
import torch
from torch import nn

class Fails(nn.Module):
    def __init__(self, embed_dim, block_size):
        super().__init__()
        self.mix = nn.Linear(embed_dim, embed_dim)
        self.block_size = block_size

    def forward(self, x):
        if self.block_size == 11:
            raise ValueError("a context of 11")
        return self.mix(x)
"""
LEAKS = """
from torch import nn

class Leaks(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.mix = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        return self.mix(x.flip(1))
"""


@pytest.fixture
def small(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and a suite of three short trainings."""
    few = {
        "copy": Exercise("copy", {"length": 4, "examples": 200}, 4, 20, "the same"),
        "sort": Exercise("sort", {"length": 5, "examples": 200}, 4, 20, "an order"),
        "facts": Exercise("facts", {"length": 1, "examples": 200}, 4, 20, "memory"),
        "copy-longer": Exercise(
            "copy", {"length": 4, "examples": 200}, 4, 20, "more of the same", longer=True
        ),
    }
    for name in [*SUITE]:
        monkeypatch.delitem(SUITE, name)
    for name, exercise in few.items():
        monkeypatch.setitem(SUITE, name, exercise)
    return here


def test_a_card_has_scores_verdicts_and_costs(small: Path) -> None:
    said = command(
        *("exam", "alibi", "--tasks", "copy,sort", "--seeds", 2, "--json", "--quiet"), cwd=small
    )
    card = json.loads(said.stdout)
    assert (card["candidate"], card["part"], card["seeds"]) == ("alibi", "scores", 2)
    assert [one["task"] for one in card["tasks"]] == ["copy", "sort"]
    folder = small / "checkpoints" / "exam-001"
    for one in card["tasks"]:
        run = attnlm.open_run(folder / f"{one['task']}-seed-2")
        settings = run.config.settings()
        assert (settings["positions"], settings["scores"]) == ("none", "alibi.py:Alibi")
        guess = run.open_dataset().bigram_loss or 0.0
        ways = [max(0.0, 1 - r.val_loss / guess) for r in run.evaluations() if r.step]
        assert len(ways) == 10
        assert one["scores"]["candidate"][1] == pytest.approx(100 * statistics.fmean(ways))
        means = [statistics.fmean(one["scores"][side]) for side in ("candidate", "standard")]
        assert [one["candidate"], one["standard"]] == pytest.approx(means)
        assert one["difference"] == pytest.approx(means[0] - means[1])
        low, high = one["interval"]
        assert low < one["difference"] < high
        assert (one["verdict"] == "not shown") == (low < 0 < high)
    assert card["costs"]["candidate"]["flops"] > 0 < card["costs"]["standard"]["seconds"]
    assert {"copy", "sort"} == {
        task for part in card["verdict"].split("; ") for task in part.split(" at ")[1].split(", ")
    }


def test_an_exam_is_one_line_of_the_list_and_the_standards_runs_are_kept(small: Path) -> None:
    data = attnlm.prepare("copy", name="mine", examples=20)
    attnlm.train(data, name="mine", steps=2, batch_size=2, block_size=17)
    attnlm.exam("transformer:positions=none", tasks="copy", seeds=1)
    kept = next((small / "checkpoints").glob("exam-standard-*/copy-seed-1/last.safetensors"))
    before = kept.stat()
    card = attnlm.exam("transformer:kv_heads=1", tasks=["copy"], seeds=1)
    assert (kept.stat().st_ino, kept.stat().st_mtime) == (before.st_ino, before.st_mtime)
    assert card.results[0].pair is not None and card.results[0].pair.verdict == "not shown"
    entries = {entry.name: (entry.kind, entry.model) for entry in attnlm.list_runs()}
    assert entries["exam-002"] == ("exam", "transformer:kv_heads=1") and len(entries) == 4
    assert attnlm.open_run().name == "mine" and attnlm.open_dataset().name == "mine"
    assert "exam-002" in command("list", cwd=small).stdout


def test_a_candidate_that_fails_in_a_task_is_examined_in_the_others(small: Path) -> None:
    (small / "fails.py").write_text(FAILS_IN_SORT)
    with pytest.raises(UsageError, match="has no task 'copi'"):
        attnlm.exam("fails.py:Fails", part="attention", tasks="copi")
    tasks = ["--tasks", "copy,sort,facts"]
    given = ["exam", "fails.py:Fails", "--part", "attention", "--quick", "--name=it", *tasks]
    done = try_command(given)
    assert done.code == 1 and "error: 1 of 3 tasks failed: sort" in done.stderr
    assert 'raise ValueError("a context of 11")' in done.stderr  # from the user's first line on
    (small / "fails.py").unlink()  # the exam has a copy
    card = attnlm.exam(resume="it")
    assert [one.failed is None for one in card.results] == [True, False, True]
    assert card.results[1].failed == "its code raised ValueError: a context of 11"
    assert "failed at sort" in card.verdict
    assert ["failed" in row for row in card.table()[1]] == [False, True, False]
    with pytest.raises(AttnlmError, match="it exists"):
        attnlm.exam("alibi", name="it")


def test_longer_questions_are_examined_on_longer_ones_without_positions(small: Path) -> None:
    card = attnlm.exam("transformer:heads=2", tasks="copy,copy-longer", seeds=1)
    for one, (positions, context, longest) in zip(
        card.results, [("learned", 9, 10), ("none", 9, 14)], strict=True
    ):
        for run in (*one.candidate, *one.standard):
            assert run.config.settings()["positions"] == positions
            assert run.config.spec.block_size == max(context, longest - 1)
        assert one.dataset.val_examples is not None
        assert one.dataset.val_examples.longest == longest
    own = attnlm.exam("transformer:positions=rotary", tasks="copy-longer", seeds=1)
    assert own.results[0].candidate[0].config.settings()["positions"] == "rotary"


def test_both_models_have_about_as_many_parameters(small: Path) -> None:
    (one,) = attnlm.exam("gru", tasks="copy", seeds=1).results
    candidate, standard = one.candidate[0], one.standard[0]
    assert candidate.parameters == pytest.approx(standard.parameters, rel=0.002)
    (one,) = attnlm.exam("transformer:mlp_width=64", tasks="copy", seeds=1).results
    assert one.candidate[0].config.settings()["mlp_width"] == 64


def test_a_model_too_large_to_be_made_equal_keeps_its_mlp_and_says_so(small: Path) -> None:
    card = attnlm.exam("transformer:embed_dim=128", tasks="copy", seeds=1, steps=2)
    (run,) = card.results[0].candidate
    times = run.parameters / card.results[0].standard[0].parameters
    assert "mlp_width" not in run.config.settings() and times > 2
    assert card.notes == [
        f"transformer:embed_dim=128 has {times:.2f} times as many parameters as the standard"
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": "copy,copy"}, "a task twice"),
        ({"seed": -1}, "invalid value for `seed`"),
        ({"candidate": "transformer", "part": "mlp"}, "`part` is for code"),
        ({"candidate": "transformer:heads=7"}, "heads"),
        ({"candidate": "alibbi"}, "no model or head is called 'alibbi'"),
    ],
)
def test_what_cannot_be_examined_leaves_nothing(
    given: dict[str, Any], said: str, small: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        attnlm.exam(**{"candidate": "alibi", **given})
    assert not [*small.glob("checkpoints/*")]


def test_a_resumed_exam_takes_no_other_settings(small: Path) -> None:
    attnlm.exam("sinks", tasks="copy", seeds=1, steps=2)
    with pytest.raises(UsageError, match="`seeds` cannot be changed"):
        attnlm.exam(resume="exam-001", seeds=2)
    assert attnlm.exam("sinks", resume="exam-001", tasks=["copy"]).plan.seeds == 1


def test_steps_can_be_given(small: Path) -> None:
    attnlm.exam("sinks", tasks="copy", seeds=1)
    (one,) = attnlm.exam("sinks", tasks="copy", seeds=1, steps=4).results
    assert [run.evaluations()[-1].step for run in (*one.candidate, *one.standard)] == [4, 4]
    with pytest.raises(UsageError, match="steps"):
        attnlm.exam("sinks", tasks="copy", steps=0)


def test_the_page_of_a_card_has_scores_answers_and_attention(
    small: Path, browser: Any, open_page: Any
) -> None:
    card = attnlm.exam("alibi", tasks="sort,facts", seeds=2)
    page = card.save(small / "card.html")
    view = open_page(page.read_bytes())
    rows = [row.inner_text() for row in view.locator("table.exam").first.locator("tr").all()][1:]
    for row, one in zip(rows, card.results, strict=True):
        assert one.task in row and one.verdict in row
        assert f"{statistics.fmean(one.scores('candidate')):.1f}" in row
    assert view.locator("table.exam svg").count() == 4
    answers = view.locator("table.exam").nth(1).inner_text()
    sample = card.results[0].sample
    assert sample["right"] == "".join(sorted(sample["question"]))
    assert all(sample[key] in answers for key in ("question", "right", "candidate", "standard"))
    assert view.locator("#thumbnails button").count() == 8
    assert "attnlm exam alibi --seeds 2 --tasks sort,facts" in view.inner_text("body")
    check_fits(browser, page, "exam")


def test_the_page_of_a_card_without_attention_has_no_maps(small: Path) -> None:
    said = command("exam", "gru", "--tasks=copy", "--quick", "-o", "card.html", "--json", cwd=small)
    assert json.loads(said.stdout)["output"] == "card.html"
    page = (small / "card.html").read_text()
    assert 'id="thumbnails"' not in page and "What they cost" in page


def test_an_exam_that_was_stopped_goes_on(small: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, attnlm.Evaluated) and event.step == 4 and len(made()) == 3:
            raise KeyboardInterrupt

    def made() -> list[Path]:
        return [*(small / "checkpoints").glob("exam-*/*-seed-*")]

    with pytest.raises(KeyboardInterrupt):
        attnlm.exam("sinks", tasks="copy,sort", seeds=1, on_event=stop)
    assert len(made()) == 3
    card = attnlm.exam(resume="exam-001")
    again = attnlm.exam("sinks", tasks="copy,sort", seeds=1)
    assert [one.facts() for one in card.results] == [one.facts() for one in again.results]


def test_a_candidate_that_sees_later_tokens_is_refused(small: Path) -> None:
    (small / "leaks.py").write_text(LEAKS)
    with pytest.raises(NotCausalError, match="is not causal"):
        attnlm.exam("leaks.py:Leaks", part="attention")
    assert not [*(small / "checkpoints").glob("exam*")]


def test_the_suite_can_be_prepared() -> None:
    for name, exercise in SUITE.items():
        if name != exam_plan.TEXT:
            found = attnlm.text.tasks.generate_examples(
                exercise.source, examples=10, size=next(iter(exercise.sizes.values()), None)
            )
            assert len(found[0]) == 10
        settings: Any = exam_plan.trainings(name, 16, [1])[f"{name}-seed-1"]
        assert settings["steps"] % settings["eval_every"] == 0


# --- Verdicts -------------------------------------------------------------------------------------


DATA: Any = SimpleNamespace(bigram_loss=2.0, floor=1.0)


def result(task: str, candidate: list[float], standard: list[float]) -> TaskResult:
    """A result with these scores."""

    def run(score: float) -> Any:
        record = SimpleNamespace(step=1, val_loss=2 - score / 100)
        return SimpleNamespace(evaluations=lambda: [SimpleNamespace(step=0, val_loss=9.0), record])

    return TaskResult(task, DATA, [*map(run, candidate)], [*map(run, standard)])


def test_verdicts_say_what_differs_seed_by_seed() -> None:
    results = judged(
        [
            result("copy", [50, 60, 70], [40, 51, 59]),
            result("sort", [50, 60, 70], [49, 61, 71]),
            result("facts", [50, 60, 70], [70, 81, 89]),
            TaskResult("addition", DATA, (), (), failed="it diverged"),
        ]
    )
    found = {one.task: one.facts() for one in results}
    assert {task: facts["verdict"] for task, facts in found.items()} == {
        "copy": "better",
        "sort": "not shown",
        "facts": "worse",
        "addition": "failed",
    }
    assert found["copy"]["difference"] == pytest.approx(10)
    assert found["addition"]["interval"] is None


SPREADS = [3, 3, 1.5, 1.2, 0.7, 0.4, 0.4, 2, 2.2, 2.2, 3.7, 0.6, 0.7, 1.2, 2.4, 0.6]
"""Standard deviations of scores of the suite's tasks, in points."""


@pytest.mark.parametrize(
    ("spreads", "seeds", "most"),
    [(SPREADS, 3, 0.055), (SPREADS, 5, 0.06), ([0.3, 6], 3, 0.07), ([0.3, 0.3, 6], 3, 0.07)],
)
def test_cards_of_equal_models_claim_a_difference_as_rarely_as_stated(
    spreads: list[float], seeds: int, most: float
) -> None:
    count = 500
    names = [f"{number}" for number in range(len(spreads))]
    scores = np.random.default_rng(1).normal(size=(count, len(spreads), 2, seeds))
    scores *= np.array(spreads)[:, None, None]
    cards = (compare_by_task(dict(zip(names, card.tolist(), strict=True))) for card in scores)
    claims = sum(any(pair.verdict != "not shown" for pair in card) for card in cards)
    assert claims / count <= most


def test_a_difference_of_ten_points_is_found_in_most_cards() -> None:
    draws = np.random.default_rng(2)
    names = [f"{number}" for number in range(len(SPREADS))]
    found = 0
    for _ in range(100):
        scores = draws.normal(size=(len(SPREADS), 2, 3)) * np.array(SPREADS)[:, None, None]
        scores[:8, 0] += 10
        pairs = compare_by_task(dict(zip(names, scores.tolist(), strict=True)))
        found += sum(pair.verdict == "better" for pair in pairs[:8])
    assert found / 800 >= 0.65
