"""Ladders whose rungs have equal parameters, operations or time, not only equal tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnlm.config.settings import Config, resolve
from attnlm.config.variants import named_codes
from attnlm.model.spec import parameter_count
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.records import DatasetFacts
from attnlm.see.comparison import Comparison, Group
from attnlm.workflows.match_compute import with_widths
from tests.browser import elements
from tests.workflows.conftest import Ladders

V = 65


def plan(*rungs: str, **about: Any) -> LadderPlan:
    dataset, codes = DatasetFacts(name=""), named_codes(rungs)
    plan = LadderPlan(dataset=dataset, rungs=rungs, seed=1, codes=codes, **about)
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
    found = with_widths(plan(first, *rungs), V)
    wanted, *others = parameters(found)
    assert wanted == parameters(plan(first))[0]
    assert others == [pytest.approx(wanted, rel=0.05)] * len(others)
    changed = {setting for sizes in found.adapted.values() for setting in sizes}
    assert "embed_dim" in changed <= {"embed_dim", "heads"}
    kept = {rung for rung, sizes in found.adapted.items() if "heads" in sizes}
    assert not kept & {"wide-head", "multi-head:heads=2", "llama:kv_heads=2"}


def test_heads_change_only_if_no_width_is_near_enough() -> None:
    near = with_widths(plan("multi-head:embed_dim=72", "multi-head"), V)
    assert near.adapted == {"multi-head": {"embed_dim": 72}}
    # The width and heads that come closest are found, though they are not near.
    small = with_widths(plan("bigram", "transformer"), 40)
    (found,) = small.adapted.values()
    sizes = [(2 * heads * n, heads) for heads in range(1, 9) for n in range(1, 9)]

    def difference(size: tuple[int, int]) -> int:
        rung = f"transformer:embed_dim={size[0]}:heads={size[1]}"
        return abs(parameters(plan(rung), 40)[0] - 40**2)

    best = min(sizes, key=difference)
    assert (found["embed_dim"], found["heads"]) == best == (6, 1)


def test_named_sizes_and_models_without_a_width_stay_as_they_are() -> None:
    rungs = ("multi-head", "single-head:embed_dim=16", "bigram")
    assert with_widths(plan(*rungs), V).adapted == {}


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
    found = with_widths(plan("multi-head:embed_dim=40", *rungs), V)
    wanted, *others, of_fixed = parameters(found)
    assert others == [pytest.approx(wanted, rel=0.05)] * 3
    assert of_fixed == 2 * 8 * V + V
    sizes = found.adapted[rungs[2]]
    assert sizes["set.n_embd"] % 3 == 0 and "heads" not in sizes
    assert "more.py:Heads: n_embd" in found.adaptation


# --- Trained --------------------------------------------------------------------------------------


def page_of(ladder: Comparison, folder: Path) -> str:
    return " ".join(elements(ladder.save(folder / "page.html").read_bytes()).text.split())


def test_parameters_that_a_rung_cannot_have_are_shown(ladders: Ladders, tmp_path: Path) -> None:
    ladder = ladders.whole("equal parameters")
    assert ladder.plan is not None and ladder.plan.adapted
    assert ladder.command.count("--equal parameters") == 1
    assert ladder.facts()["ladder"]["adapted"] == ladder.plan.adapted
    page = page_of(ladder, tmp_path)
    assert "The width of each rung gives it about as many parameters as the first." in page
    assert f"So the rungs have {ladder.plan.adaptation}." in page
    fixed = ladder.groups[2]
    off = f" ({fixed.shown.parameters / ladder.groups[0].shown.parameters - 1:+.0%})"
    header, rows = ladder.table()
    assert rows[2][header.index("parameters")].endswith(off)
    assert f"parameters are not equal in all rungs: {fixed.name}{off}" in ladder.warnings
    first = Group(ladder.groups[0].name, (), failed="diverged")  # nobody knows its parameters
    failed = replace(ladder, groups=(*ladder.groups[1:], first))
    assert not any("parameters are not equal" in warning for warning in failed.warnings)


def test_a_difference_in_size_is_a_warning(ladders: Ladders, tmp_path: Path, fixed: Path) -> None:
    rungs = ("single-head:embed_dim=8", "single-head:embed_dim=32", f"{fixed}:Fixed")
    ladder = ladders.train(tmp_path, rungs=rungs, steps=2)
    _, large, small = ladder.groups
    times = large.shown.parameters / small.shown.parameters
    said = f"{large.name} has {times:.1f} times as many parameters as {small.name}"
    assert said in ladder.warnings
    assert "All rungs make the same steps: --equal can hold parameters" in page_of(ladder, tmp_path)
