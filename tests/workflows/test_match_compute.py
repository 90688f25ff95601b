"""Ladders whose rungs have equal parameters, operations or time, not only equal tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.events import Note
from attnlm.cli.ladder import ladder_facts
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import named_codes
from attnlm.model.inspection import parameter_count
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.see.ladder import Ladder
from attnlm.see.reproduce import ladder_command
from attnlm.workflows.match_compute import relative_steps, with_steps, with_widths
from tests.browser import elements
from tests.kit import Clock
from tests.workflows.conftest import Ladders

V = 65


def plan(*rungs: str, **about: Any) -> LadderPlan:
    plan = LadderPlan("", "", "", "", rungs, 1, 64, 32, "", 0, codes=named_codes(rungs), **about)
    plan.check()
    return plan


def config(plan: LadderPlan, rung: str) -> Config:
    return resolve({}, plan.settings(rung, 1))


def parameters(plan: LadderPlan, vocab_size: int = V) -> list[int]:
    return [parameter_count(config(plan, rung).spec, vocab_size) for rung in plan.rungs]


# --- Parameters -----------------------------------------------------------------------------------

ONE_LAYER = ("average", "single-head", "wide-head", "multi-head:heads=2", "multi-head:head_size=5")
DEEP = ("transformer", "gpt2:layers=3", "llama:kv_heads=2", "gpt2:attention=none:layers=3")


@pytest.mark.parametrize("first", ["multi-head:embed_dim=200", "transformer"])
def test_widths_give_each_rung_the_parameters_of_the_first(first: str) -> None:
    rungs = [rung for rung in (*ONE_LAYER, *DEEP) if rung != first]
    found = with_widths(plan(first, *rungs, equal="parameters"), V)
    wanted, *others = parameters(found)
    assert wanted == parameters(plan(first))[0]
    assert others == [pytest.approx(wanted, rel=0.05)] * len(others)
    changed = {setting for sizes in found.adapted.values() for setting in sizes}
    assert "embed_dim" in changed <= {"embed_dim", "heads"}
    kept = {rung for rung, sizes in found.adapted.items() if "heads" in sizes}
    assert not kept & {"wide-head", "multi-head:heads=2", "llama:kv_heads=2"}


def test_heads_change_only_if_no_width_is_near_enough() -> None:
    near = with_widths(plan("multi-head:embed_dim=72", "multi-head", equal="parameters"), V)
    assert near.adapted == {"multi-head": {"embed_dim": 72}}
    # The width and heads that come closest are found, though they are not near.
    small = with_widths(plan("bigram", "transformer", equal="parameters"), 40)
    (found,) = small.adapted.values()
    sizes = [(2 * heads * n, heads) for heads in range(1, 9) for n in range(1, 9)]

    def difference(size: tuple[int, int]) -> int:
        rung = f"transformer:embed_dim={size[0]}:heads={size[1]}"
        return abs(parameters(plan(rung), 40)[0] - 40**2)

    best = min(sizes, key=difference)
    assert (found["embed_dim"], found["heads"]) == best == (6, 1)


def test_named_sizes_and_models_without_a_width_stay_as_they_are() -> None:
    rungs = ("multi-head", "single-head:embed_dim=16", "bigram")
    assert with_widths(plan(*rungs, equal="parameters"), V).adapted == {}
    assert with_widths(plan("multi-head", "average"), V).adapted == {}


FIXED = """
from torch import nn

class Fixed(nn.Sequential):
    def __init__(self, vocab_size):
        super().__init__(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

class Heads(nn.Sequential):
    def __init__(self, vocab_size, n_embd=24, n_head=3):
        assert n_embd % n_head == 0
        super().__init__(nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size))
"""


@pytest.fixture
def fixed(code: Path, tmp_path: Path) -> Path:
    """A file with FIXED."""
    (tmp_path / "more.py").write_text(FIXED)
    return tmp_path / "more.py"


def test_own_parts_and_models_are_counted_by_running_them(code: Path, fixed: Path) -> None:
    head = f"multi-head:attention={code}/parts.py:Head"
    rungs = (head, f"{code}/models.py:lecture", f"{fixed}:Heads", f"{fixed}:Fixed")
    found = with_widths(plan("multi-head:embed_dim=40", *rungs, equal="parameters"), V)
    wanted, *others, of_fixed = parameters(found)
    assert others == [pytest.approx(wanted, rel=0.05)] * 3
    assert of_fixed == 2 * 8 * V + V
    sizes = found.adapted[rungs[2]]
    assert sizes["set.n_embd"] % 3 == 0 and "heads" not in sizes
    assert "more.py:Heads: n_embd" in found.adaptation


# --- Operations -----------------------------------------------------------------------------------


def test_steps_give_each_rung_the_operations_of_the_first_that_has_any(code: Path) -> None:
    head = f"multi-head:attention={code}/parts.py:Head"
    rungs = ("bigram", "multi-head", "average", head, "transformer:batch_size=8")
    given = plan(*rungs, equal="flops", steps=1000)
    found = with_steps(given, relative_steps(given, V))
    settings = [config(found, rung) for rung in rungs]
    flops = [
        one.spec.costs(V).training_flops * one.tokens_per_step * (one.training.steps or 0)
        for one in settings
    ]
    assert flops[0] == 0 and flops[1:] == [pytest.approx(flops[1], rel=0.005)] * 4
    steps = [one.training.steps for one in settings]
    assert steps[:2] == [1000, 1000] and len(set(steps)) == 4
    assert settings[2].training.eval_every == -(-(steps[2] or 0) // 10)


# --- Trained --------------------------------------------------------------------------------------


def page_of(ladder: Ladder) -> str:
    return " ".join(elements(ladder.write_page().read_bytes()).text.split())


def test_parameters_that_a_rung_cannot_have_are_shown(ladders: Ladders) -> None:
    ladder = ladders.whole("equal parameters")
    assert ladder_command(ladder.plan).count("--equal parameters") == 1
    assert ladder_facts(ladder)["adapted"] == ladder.plan.adapted != {}
    said = "The width of each rung gives it about as many parameters as bigram"
    assert f"{said} ({ladder.plan.adaptation})." in page_of(ladder)
    assert "each trained for 6 steps of 32 × 64 tokens, the same in the same" in page_of(ladder)
    fixed = ladder.rungs[2]
    off = f" ({fixed.run.parameters / ladder.rungs[0].run.parameters - 1:+.0%})"
    header, rows = ladder.table()
    assert rows[2][header.index("parameters")].endswith(off)
    assert f"parameters are not equal to those of bigram: {fixed.model}{off}" in ladder.warnings
    assert not any("equally wide" in warning for warning in ladder.warnings)


def test_steps_of_equal_operations_are_shown(ladders: Ladders) -> None:
    ladder = ladders.whole("equal flops")
    assert ladder_command(ladder.plan).count("--equal flops") == 1
    assert ladder_facts(ladder)["adapted"] == ladder.plan.adapted != {}
    said = "Each rung makes the steps that need as many FLOPs, forward and backward, as single-head"
    assert f"{said} ({ladder.plan.adaptation})." in page_of(ladder)
    assert "each trained on batches of 32 × 64 tokens, the same in the same" in page_of(ladder)
    header, rows = ladder.table()
    assert [row[header.index("steps")] for row in rows] == [
        f"{rung.result.last.step}" for rung in ladder.rungs
    ]
    assert "FLOPs are not equal to those of single-head: bigram (-100%)" in ladder.warnings


def test_runs_of_equal_time_make_the_steps_that_fit(
    ladders: Ladders, tmp_path: Path, ticking_clock: Clock
) -> None:
    def stop_at_rung_2(event: object) -> None:
        if isinstance(event, Note) and event.text.startswith("rung 2"):
            raise KeyboardInterrupt

    given: dict[str, Any] = {"equal": "time", "budget": 0.5, "seeds": 2, "name": "e"}
    given |= {"steps": None, "eval_every": None}
    with pytest.raises(KeyboardInterrupt):
        ladders.train(tmp_path, on_event=stop_at_rung_2, **given)
    ladder = ladders.train(tmp_path, **given)
    paths = ladder.plan.runs(ladder.path)
    runs = {key: attnlm.open_run(path) for key, path in paths.items()}
    budgets = {key: run.config.training.budget for key, run in runs.items()}
    assert {budgets[rung, 1] for rung in ladder.plan.rungs} == {
        0.9 * 0.5 / 4
    }  # later: the same steps
    assert ladder.plan.steps is None and len(ladder.plan.adapted) == 2
    for rung, adapted in ladder.plan.adapted.items():
        steps = {runs[rung, seed].config.training.steps for seed in (1, 2)}
        assert steps == {adapted["steps"]}
    assert len({rung.run.config.training.eval_tokens for rung in ladder.rungs}) == 1
    page = ladder.write_page().read_text(encoding="utf-8")
    assert "All runs have the same time, and each makes the steps that fit" in page
    assert "--equal time" in page and "--budget 0.5" in page and "--steps" not in page


def test_a_difference_in_size_is_a_warning(ladders: Ladders, tmp_path: Path, fixed: Path) -> None:
    rungs = ("single-head:embed_dim=8", "single-head:embed_dim=32", f"{fixed}:Fixed")
    ladder = ladders.train(tmp_path, rungs=rungs, steps=2)
    _, large, small = ladder.rungs
    times = large.run.parameters / small.run.parameters
    said = f"{large.model} has {times:.1f} times as many parameters as {small.model}"
    assert said in ladder.warnings
    assert "All rungs make the same steps: --equal can hold parameters" in page_of(ladder)
    ladder = ladders.train(tmp_path / "p", rungs=rungs[1:], steps=2, equal="parameters")
    (said,) = (one for one in ladder.warnings if one.startswith("parameters are not equal"))
    assert said.endswith("it has no embed_dim, n_embd, d_model, width, hidden_size to adapt")
