"""Ladders whose rungs have equal parameters, operations or time, not only equal tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import UsageError
from attnlm.base.events import Note
from attnlm.cli.ladder import ladder_facts
from attnlm.config.settings import Config, resolve
from attnlm.config.variants import named_codes
from attnlm.data.dataset import Dataset
from attnlm.model.inspection import parameter_count
from attnlm.runs.ladder_plan import LadderPlan, read_plan
from attnlm.see.ladder import Ladder
from attnlm.see.reproduce import ladder_command
from attnlm.workflows.match_compute import relative_steps, with_steps, with_widths
from tests import own_code
from tests.browser import elements
from tests.kit import Clock, command

V = 65


def plan(*rungs: str, **about: Any) -> LadderPlan:
    plan = LadderPlan("", "", "", "", rungs, 1, 64, 32, "", 0, codes=named_codes(rungs), **about)
    plan.check()
    return plan


def config(plan: LadderPlan, rung: str) -> Config:
    return resolve({}, plan.settings(rung, 1))


def parameters(plan: LadderPlan) -> list[int]:
    return [parameter_count(config(plan, rung).spec, V) for rung in plan.rungs]


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
    changed = {one.setting for one in found.adapted}
    assert "embed_dim" in changed <= {"embed_dim", "heads"}
    kept = {one.rung for one in found.adapted if one.setting == "heads"}
    assert not kept & {"wide-head", "multi-head:heads=2", "llama:kv_heads=2"}


def test_heads_change_only_if_no_width_is_near_enough() -> None:
    near = with_widths(plan("multi-head:embed_dim=72", "multi-head", equal="parameters"), V)
    assert [(one.setting, one.value) for one in near.adapted] == [("embed_dim", 72)]
    # The width and heads that come closest are found, though they are not near.
    small = with_widths(plan("bigram", "transformer", equal="parameters"), 40)
    found = {one.setting: one.value for one in small.adapted}
    sizes = [(2 * heads * n, heads) for heads in range(1, 9) for n in range(1, 9)]
    given: dict[str, Any] = {"model": "transformer", "block_size": 64}
    offs = {
        size: parameter_count(
            resolve({}, {**given, "embed_dim": size[0], "heads": size[1]}).spec, 40
        )
        for size in sizes
    }
    best = min(sizes, key=lambda size: abs(offs[size] - 40**2))
    assert (found["embed_dim"], found["heads"]) == best == (6, 1)


def test_named_sizes_and_models_without_a_width_stay_as_they_are() -> None:
    rungs = ("multi-head", "single-head:embed_dim=16", "bigram")
    assert with_widths(plan(*rungs, equal="parameters"), V).adapted == ()
    assert with_widths(plan("multi-head", "average"), V).adapted == ()


FIXED = """
from torch import nn

class Fixed(nn.Sequential):
    def __init__(self, vocab_size):
        super().__init__(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))

class Heads(nn.Sequential):
    def __init__(self, vocab_size, n_embd=24, n_head=3):
        assert n_embd % n_head == 0
        super().__init__(nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size))

class Brittle(nn.Sequential):
    def __init__(self, vocab_size, width=12):
        assert width % 12 == 0, "12 divides it"
        super().__init__(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = own_code.written(tmp_path / "code")
    (folder / "more.py").write_text(FIXED)
    return folder


def test_own_parts_and_models_are_counted_by_running_them(code: Path) -> None:
    head = f"multi-head:attention={code}/parts.py:Head"
    rungs = (head, f"{code}/models.py:lecture", f"{code}/more.py:Heads", f"{code}/more.py:Fixed")
    found = with_widths(plan("multi-head:embed_dim=40", *rungs, equal="parameters"), V)
    wanted, *others, fixed = parameters(found)
    assert others == [pytest.approx(wanted, rel=0.05)] * 3
    assert fixed == 2 * 8 * V + V
    sizes = {(one.rung, one.setting): one.value for one in found.adapted}
    assert sizes[rungs[2], "set.n_embd"] % 3 == 0 and (rungs[2], "heads") not in sizes
    assert "more.py:Heads: n_embd" in found.adaptation


def test_a_model_that_fails_with_another_width_is_refused(code: Path) -> None:
    rungs = (f"{code}/more.py:Heads", f"{code}/more.py:Brittle")
    said = "Brittle fails with another width: .*12 divides"
    with pytest.raises(UsageError, match=said) as caught:
        with_widths(plan(*rungs, equal="parameters"), V)
    assert "heads" in caught.value.hint


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


SMALL: dict[str, Any] = {"rungs": ("bigram", "single-head", "average:embed_dim=32"), "seed": 1}
SMALL |= {"tokens": 5, "eval_tokens": 256}


def trained(dataset: Dataset, folder: Path, **given: Any) -> Ladder:
    return attnlm.ladder(dataset, checkpoint_dir=folder, name="e", **{**SMALL, **given})


def facts(ladder: Ladder) -> list[tuple[Any, ...]]:
    return [(rung.text, rung.losses, rung.run.config.training.steps) for rung in ladder.rungs]


def stop_at_rung_2(event: object) -> None:
    if isinstance(event, Note) and event.text.startswith("rung 2"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("equal", ["parameters", "flops"])
def test_a_stopped_ladder_keeps_its_widths_and_steps(
    equal: str, dataset: Dataset, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"equal": equal, "steps": 4}
    ladder = trained(dataset, tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        trained(dataset, tmp_path / "stopped", on_event=stop_at_rung_2, **given)
    kept = read_plan(tmp_path / "stopped" / "e")
    assert kept == ladder.plan and kept.adapted
    again = trained(dataset, tmp_path / "stopped", **given)
    assert again.plan == ladder.plan and facts(again) == facts(ladder)
    with pytest.raises(UsageError, match="`equal` cannot be changed"):
        trained(dataset, tmp_path / "whole", **{**given, "equal": "tokens"})

    page = " ".join(elements(ladder.write_page().read_bytes()).text.split())
    said = {
        "parameters": "The width of each rung gives it about as many parameters as bigram",
        "flops": "Each rung makes the steps that need as many FLOPs, forward and backward, as "
        "single-head",
    }[equal]
    assert f"{said} ({ladder.plan.adaptation})." in page
    trained_on = {"parameters": "for 4 steps of", "flops": "on batches of"}[equal]
    assert f"each trained {trained_on} 32 × 64 tokens, the same in the same order (seed" in page
    assert ladder_command(ladder.plan).count(f"--equal {equal}") == 1
    found = ladder_facts(ladder)
    assert found["equal"] == equal
    assert found["adapted"] == [vars(one) for one in ladder.plan.adapted]
    header, rows = ladder.table()
    if equal == "flops":
        assert [row[header.index("steps")] for row in rows] == [
            f"{rung.result.last.step}" for rung in ladder.rungs
        ]
        assert "FLOPs are not equal to those of single-head: bigram (-100%)" in ladder.warnings
    else:
        fixed = ladder.rungs[2]
        off = f" ({fixed.run.parameters / ladder.rungs[0].run.parameters - 1:+.0%})"
        assert rows[2][header.index("parameters")].endswith(off)
        assert f"parameters are not equal to those of bigram: {fixed.model}{off}" in ladder.warnings
        assert not any("equally wide" in warning for warning in ladder.warnings)


def test_a_budget_becomes_steps_of_equal_operations(
    dataset: Dataset, tmp_path: Path, ticking_clock: Clock
) -> None:
    ladder = trained(dataset, tmp_path, equal="flops", budget=0.5)
    plan, times = ladder.plan, relative_steps(ladder.plan, dataset.vocab_size)
    assert plan.steps is not None and plan == read_plan(ladder.path)
    made = [rung.result.last.step for rung in ladder.rungs]
    assert made == [round(plan.steps * n) for n in times.values()]
    assert made[0] == made[1] == plan.steps and made[2] > made[1]


def test_runs_of_equal_time_make_the_steps_that_fit(
    dataset: Dataset, tmp_path: Path, ticking_clock: Clock
) -> None:
    given: dict[str, Any] = {"equal": "time", "budget": 0.5, "seeds": 2}
    given["rungs"] = ("bigram", "single-head")
    with pytest.raises(KeyboardInterrupt):
        trained(dataset, tmp_path, on_event=stop_at_rung_2, **given)
    ladder = trained(dataset, tmp_path, **given)
    runs = [attnlm.open_run(path) for path in ladder.plan.runs(ladder.path).values()]
    assert len({run.config.training.budget for run in runs}) == 1
    assert ladder.plan.steps is None and len(ladder.plan.adapted) == 2
    for one in ladder.plan.adapted:
        seed_1 = attnlm.open_run(ladder.plan.runs(ladder.path)[one.rung, 1])
        assert one.value == seed_1.config.training.steps
    assert len({rung.run.config.training.eval_tokens for rung in ladder.rungs}) == 1
    page = ladder.write_page().read_text(encoding="utf-8")
    assert "All runs have the same time, and each makes the steps that fit" in page
    assert "--equal time" in page and "--budget 0.5" in page and "--steps" not in page


# --- What is not like for like, and errors --------------------------------------------------------


def test_a_difference_in_size_is_a_warning(dataset: Dataset, tmp_path: Path, code: Path) -> None:
    rungs = ("single-head:embed_dim=8", "single-head:embed_dim=32", f"{code}/more.py:Fixed")
    ladder = trained(dataset, tmp_path, rungs=rungs, steps=2)
    large, small = ladder.rungs[1], ladder.rungs[2]
    times = large.run.parameters / small.run.parameters
    said = f"{large.model} has {times:.1f} times as many parameters as {small.model}"
    assert said in ladder.warnings
    assert "All rungs make the same steps: --equal can hold parameters" in (
        ladder.write_page().read_text(encoding="utf-8")
    )
    ladder = trained(dataset, tmp_path / "p", rungs=rungs[1:], steps=2, equal="parameters")
    (said,) = (one for one in ladder.warnings if one.startswith("parameters are not equal"))
    assert said.endswith("it has no embed_dim, n_embd, d_model, width, hidden_size to adapt")


def test_the_command_holds_operations_equal(project: Path, tmp_path: Path) -> None:
    words = ["ladder", "fruits-char", "--rungs", "single-head,average", "--steps", "3"]
    words += ["--equal", "flops", "--tokens", "2", "--checkpoint-dir", str(tmp_path)]
    done = command(*words, "--json", cwd=project)
    first, second = json.loads(done.stdout)["rungs"]
    assert second["steps"] > first["steps"] == 3
    assert second["flops"] == pytest.approx(first["flops"], rel=0.2)
    assert "for equal flops: single-head: steps 3; average: steps" in done.stderr
    assert "each rung makes the steps that need as many FLOPs" in done.stderr
