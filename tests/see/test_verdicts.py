"""Verdicts: false claims are as rare as stated, and true differences are found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.data.dataset import Dataset
from attnlm.see.verdicts import FALSE_CLAIMS, Pair, compare_pairs, interval, t_quantile


def test_quantiles_equal_a_table() -> None:
    """The tables of any textbook, such as NIST/SEMATECH e-Handbook, 1.3.6.7.2."""
    five = {1: 12.706, 2: 4.303, 3: 3.182, 9: 2.262, 30: 2.042, 100: 1.984}
    one = {1: 63.657, 2: 9.925, 3: 5.841, 9: 3.250, 30: 2.750, 100: 2.626}
    assert {n: t_quantile(0.05, n) for n in five} == pytest.approx(five, abs=5e-4)
    assert {n: t_quantile(0.01, n) for n in one} == pytest.approx(one, abs=5e-4)


def test_an_interval_is_the_mean_and_t_standard_errors_around_it() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), 1e-3
    )


def claims(ladder: dict[str, list[float]]) -> list[Pair]:
    return [pair for pair in compare_pairs(ladder) if pair.verdict != "not shown"]


def ladders(seed: int, *, count: int, rungs: int, seeds: int) -> list[dict[str, list[float]]]:
    """Ladders of equal rungs, whose seeds have a part of their losses in common."""
    draws = np.random.default_rng(seed)
    losses = draws.normal(size=(count, rungs, seeds)) + draws.normal(size=(count, 1, seeds))
    return [{str(i): rung for i, rung in enumerate(ladder)} for ladder in losses.tolist()]


@pytest.mark.parametrize(("seeds", "rungs"), [(2, 3), (3, 2), (3, 5)])
def test_ladders_of_equal_rungs_claim_a_difference_as_rarely_as_stated(
    seeds: int, rungs: int
) -> None:
    count = 600
    found = sum(bool(claims(one)) for one in ladders(1, count=count, rungs=rungs, seeds=seeds))
    chance = 3 * math.sqrt(FALSE_CLAIMS * (1 - FALSE_CLAIMS) / count)
    assert found / count <= FALSE_CLAIMS + chance
    if rungs == 2:  # one comparison is as exact as the distribution of t
        assert found / count >= FALSE_CLAIMS - chance


def test_a_clear_difference_does_not_add_false_claims() -> None:
    """The clear differences leave larger levels to the others."""
    count, found = 500, 0
    for ladder in ladders(2, count=count, rungs=3, seeds=3):
        ladder["0"] = [loss + 1e6 for loss in ladder["0"]]
        shown = {(pair.rung, pair.rival) for pair in claims(ladder)}
        assert {("1", "0"), ("2", "0")} <= shown
        found += ("2", "1") in shown
    assert 0.02 <= found / count <= 0.08


def test_verdicts_follow_the_interval_and_state_the_seeds_that_are_needed() -> None:
    ladder = {"a": [1.0, 2.0, 3.0], "b": [0.9, 1.9, 2.9], "c": [1.1, 1.9, 2.9]}
    ladder["d"] = [2.0, 3.1, 4.2]
    pairs = compare_pairs(ladder)
    assert [(p.rung, p.rival) for p in pairs] == [
        *(("b", "a"), ("c", "a"), ("d", "a"), ("c", "b"), ("d", "b"), ("d", "c"))
    ]
    of = {(pair.rung, pair.rival): pair for pair in pairs}
    assert of["b", "a"].difference == pytest.approx(0.1)
    assert (of["b", "a"].verdict, of["d", "a"].verdict) == ("better", "worse")
    assert of["d", "a"].interval == pytest.approx(interval([-1.0, -1.1, -1.2], 0.05 / 4))
    for pair in pairs:
        assert pair.interval is not None
        assert (pair.verdict == "not shown") == (pair.interval[0] <= 0 <= pair.interval[1])
    assert of["c", "a"].seeds_needed is None  # over 100
    assert of["c", "b"].seeds_needed == 31
    two = compare_pairs({"a": [1.0, 1.1], "b": [0.9, 0.9]})[0]  # a mean of 0.15, a spread of 0.071
    assert (two.verdict, two.seeds_needed) == ("not shown", 4)
    assert compare_pairs({"a": [1.0, 1.1], "b": [1.1, 1.0]})[0].seeds_needed is None
    assert compare_pairs({"a": [1.0], "b": [0.5]}) == [Pair("b", "a", 0.5, None, "not shown", None)]
    same = compare_pairs({"a": [1.0, 1.5], "b": [1.0, 1.5]})[0]
    assert (same.difference, same.interval, same.verdict) == (0, (0, 0), "the same")
    assert compare_pairs({"a": [1.0, 1.5]}) == []


@pytest.mark.parametrize("seeds", [1, 3])
def test_rungs_that_differ_by_rounding_are_the_same(seeds: int) -> None:
    """As a part with its idea switched off, which sums in another order."""
    plain = [2.5, 2.6, 2.7][:seeds]
    off = [loss - 4e-8 for loss in plain]
    on = [loss - 4e-5 for loss in plain]
    same, *others = compare_pairs({"plain": plain, "off": off, "on": on})
    assert (same.difference, same.verdict, same.seeds_needed) == (0, "the same", None)
    assert {pair.verdict for pair in others} == {"better" if seeds > 1 else "not shown"}


SAME = """
import torch

class Same(torch.nn.Module):
    def __init__(self, draws=0):
        super().__init__()
        torch.rand(draws)  # so that the weights after it are others

    def forward(self, query, key):
        return query @ key.mT * query.size(-1) ** -0.5
"""


@pytest.mark.slow
def test_one_trained_model_with_two_names_has_few_false_claims(
    dataset: Dataset, tmp_path: Path
) -> None:
    """Both are trained on the same batches, from other weights."""
    (tmp_path / "same.py").write_text(SAME)
    named = f"multi-head:scores={tmp_path / 'same.py'}:Same:embed_dim=16:draws="
    given: dict[str, Any] = {"steps": 20, "eval_every": 20, "tokens": 1, "threads": 1, "seed": 1}
    rungs = [f"{named}1", f"{named}2"]
    found = attnlm.ladder(dataset, rungs=rungs, seeds=60, checkpoint_dir=tmp_path, **given)
    losses = [[one.final.val_loss for one in rung.results] for rung in found.rungs]
    assert len({*losses[0], *losses[1]}) == 120
    draws, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        three = draws.choice(60, size=3, replace=False)
        wrong += bool(claims({str(i): [rung[k] for k in three] for i, rung in enumerate(losses)}))
    assert wrong / 200 <= 0.1  # the ladders have seeds in common, so that it varies more
