"""Verdicts: false claims are as rare as stated, and true differences are found."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import pytest

from attnlm.see.verdicts import FALSE_CLAIMS, Pair, compare_pairs, interval, t_quantile, t_tails

# Values of SciPy 1.17.1: the probability that |t| exceeds t, and the t that |t| exceeds with it.
TAILS = {
    (0.5, 1.0): 0.7048327646991335,
    (2.0, 3.5): 0.12613852257591343,
    (3.0, 12.0): 0.01106669568603369,
    (10.0, 2.25): 0.006558607310834564,
    (1e-3, 40.0): 0.9992070862860574,
}
QUANTILES = {
    (0.05, 3.5): 2.9400886379827296,
    (0.01, 12.0): 3.054539589392902,
    (0.0083, 6.25): 3.80053749722604,
    (0.9, 1.0): 0.15838444032453633,
    (1e-4, 80.0): 4.095894827181762,
}
# Losses of four groups, and p of some pairs as Smyth's formulas give it with SciPy's functions. The
# third of the noisy groups makes a weak prior; else the prior has its limit.
NOISY = {
    "a": [2.50, 2.61, 2.55, 2.58, 2.52],
    "b": [2.47, 2.60, 2.50, 2.57, 2.50],
    "c": [2.41, 2.73, 2.19, 2.64, 2.39],
    "d": [2.495, 2.605, 2.546, 2.578, 2.516],
}
EVEN = {
    "a": [2.50, 2.61, 2.55, 2.58],
    "b": [2.47, 2.60, 2.50, 2.57],
    "c": [2.41, 2.52, 2.49, 2.44],
    "d": [2.52, 2.60, 2.58, 2.59],
}
P_NOISY = {"b": 0.024310836435596516, "c": 0.3615042578174706, "d": 0.0700942925688167}
P_EVEN = {"b": 0.12510456999960637, "c": 0.0013906867685571148, "d": 0.3965530230940281}
P_TO_BASELINE = {"b": 0.10414059329202911, "c": 0.005166697636412639, "d": 0.3290332576463727}


def keyed(groups: Mapping[str, Sequence[float]]) -> dict[str, dict[Hashable, float]]:
    """Groups of runs with the seeds 0, 1, …"""
    return {name: dict(enumerate(losses)) for name, losses in groups.items()}


def test_the_distribution_of_t_is_that_of_scipy_for_any_degrees_of_freedom() -> None:
    assert {n: t_tails(*n) for n in TAILS} == pytest.approx(TAILS, rel=1e-9)
    assert {n: t_quantile(*n) for n in QUANTILES} == pytest.approx(QUANTILES, rel=1e-9)


def test_an_interval_is_the_mean_and_t_standard_errors_around_it() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), 1e-3
    )


@pytest.mark.parametrize(
    ("groups", "baseline", "wanted"),
    [(NOISY, None, P_NOISY), (EVEN, None, P_EVEN), (EVEN, "a", P_TO_BASELINE)],
)
def test_spreads_are_moderated_as_smyth_describes(
    groups: dict[str, list[float]], baseline: str | None, wanted: dict[str, float]
) -> None:
    pairs = compare_pairs(keyed(groups), baseline)
    found = {pair.groups[0]: pair.p for pair in pairs if pair.groups[1] == "a"}
    assert found == pytest.approx(wanted, rel=1e-7)


def test_groups_of_other_seeds_are_compared_by_welchs_test() -> None:
    groups = {"a": [2.61, 2.58, 2.66, 2.6], "b": [2.5, 2.71, 2.43]}
    (pair,) = compare_pairs(keyed(groups))
    assert not pair.paired and pair.verdict == "not shown"
    assert pair.p == pytest.approx(0.517912407465486, rel=1e-9)
    assert pair.interval == pytest.approx((-0.27783064909794153, 0.40949731576460746), rel=1e-9)
    (paired,) = compare_pairs(keyed({**groups, "b": [*groups["b"], 2.5]}))
    assert paired.paired
    alone = compare_pairs({"a": {1: 2.5, 2: 2.6}, "b": {3: 2.5}})[0]
    assert (alone.interval, alone.p, alone.verdict) == (None, None, "not shown")


def test_a_baseline_is_compared_with_each_other_group() -> None:
    groups = keyed({"a": [2.5, 2.6], "b": [2.4, 2.5], "c": [2.6, 2.7]})
    pairs = compare_pairs(groups, "b")
    assert [(*p.groups, round(p.difference, 6)) for p in pairs] == [
        ("a", "b", -0.1),
        ("c", "b", -0.2),
    ]


def claims(ladder: Mapping[str, Sequence[float]], baseline: str | None = None) -> list[Pair]:
    return [p for p in compare_pairs(keyed(ladder), baseline) if p.verdict != "not shown"]


def ladders(
    seed: int, *, count: int, noise: Sequence[float], seeds: int
) -> list[dict[str, list[float]]]:
    """Ladders of rungs of equal means, whose seeds have a part of their losses in common."""
    draws = np.random.default_rng(seed)
    losses = draws.normal(size=(count, len(noise), seeds)) * np.array(noise)[:, None]
    losses += draws.normal(size=(count, 1, seeds))
    return [{str(i): rung for i, rung in enumerate(ladder)} for ladder in losses.tolist()]


@pytest.mark.parametrize("baseline", [None, "0"])
@pytest.mark.parametrize(
    ("seeds", "noise"), [(2, [1, 1, 1]), (3, [1, 1]), (4, [1, 1, 1, 5]), (3, [3, 1, 1, 1])]
)
def test_ladders_of_equal_rungs_claim_a_difference_as_rarely_as_stated(
    seeds: int, noise: list[float], baseline: str | None
) -> None:
    """One noisy rung is the worst case: it makes the prior of the others too small."""
    count = 500
    drawn = ladders(1, count=count, noise=noise, seeds=seeds)
    found = sum(bool(claims(one, baseline)) for one in drawn)
    chance = 3 * math.sqrt(FALSE_CLAIMS * (1 - FALSE_CLAIMS) / count)
    assert found / count <= 0.056 + chance
    if len(noise) == 2:  # one comparison is as exact as the distribution of t
        assert found / count >= FALSE_CLAIMS - chance


@pytest.mark.parametrize(("baseline", "power"), [(None, 0.29), ("0", 0.28)])
def test_a_better_rung_is_found_as_often_as_simulated(baseline: str | None, power: float) -> None:
    """Of 4 rungs and 4 seeds, the last is better by 2 standard deviations."""
    count, found = 250, 0.0
    for ladder in ladders(3, count=count, noise=[1] * 4, seeds=4):
        ladder["3"] = [loss - 2 for loss in ladder["3"]]
        shown = [pair for pair in claims(ladder, baseline) if pair.groups[0] == "3"]
        found += len(shown) / (1 if baseline else 3)
    assert found / count == pytest.approx(power, abs=0.08)


def test_a_clear_difference_does_not_add_false_claims() -> None:
    """The clear differences leave larger levels to the others."""
    count, found = 500, 0
    for ladder in ladders(2, count=count, noise=[1, 1, 1], seeds=3):
        ladder["0"] = [loss + 1e6 for loss in ladder["0"]]
        shown = {pair.groups for pair in claims(ladder)}
        assert {("1", "0"), ("2", "0")} <= shown
        found += ("2", "1") in shown
    assert 0.02 <= found / count <= 0.08


def test_verdicts_follow_the_interval_and_state_the_seeds_that_are_needed() -> None:
    ladder = {"a": [1.0, 2.0, 3.0], "b": [0.9, 1.9, 2.9], "c": [1.1, 1.9, 2.9]}
    ladder["d"] = [2.0, 3.1, 4.2]
    pairs = compare_pairs(keyed(ladder))
    assert [p.groups for p in pairs] == [
        *(("b", "a"), ("c", "a"), ("d", "a"), ("c", "b"), ("d", "b"), ("d", "c"))
    ]
    of = {pair.groups: pair for pair in pairs}
    assert of["b", "a"].difference == pytest.approx(0.1)
    assert of["d", "a"].verdict == "worse"
    for pair in pairs:
        assert pair.interval is not None and pair.p is not None
        assert sum(pair.interval) / 2 == pytest.approx(pair.difference)
        assert (pair.verdict == "not shown") == (pair.interval[0] <= 0 <= pair.interval[1])
        assert pair.seeds_needed is None or pair.verdict == "not shown"
    assert of["c", "a"].seeds_needed is None  # over 100
    two = compare_pairs(keyed({"a": [1.0, 1.1], "b": [0.9, 0.9]}))[0]
    assert two.interval == pytest.approx(interval([0.1, 0.2]))  # as without moderation
    assert (two.verdict, two.seeds_needed) == ("not shown", 4)
    assert compare_pairs(keyed({"a": [1.0, 1.1], "b": [1.1, 1.0]}))[0].seeds_needed is None
    assert compare_pairs(keyed({"a": [1.0], "b": [0.5]})) == [
        Pair(("b", "a"), 0.5, None, "not shown", None)
    ]
    same = compare_pairs(keyed({"a": [1.0, 1.5], "b": [1.0, 1.5]}))[0]
    assert (same.difference, same.interval, same.verdict) == (0, (0, 0), "the same")
    shifted = keyed({"a": [1.5, 2.5], "b": [1.0, 2.0]})
    assert compare_pairs(shifted)[0].verdict == "better"
    (shares,) = compare_pairs(shifted, are_shares=True)
    assert (shares.interval, shares.verdict, shares.p) == (None, "not shown", None)
    assert compare_pairs(keyed({"a": [1.0, 1.5]})) == []


@pytest.mark.parametrize("seeds", [1, 3])
def test_rungs_that_differ_by_rounding_are_the_same(seeds: int) -> None:
    """As a part with its idea switched off, which sums in another order."""
    plain = [2.5, 2.6, 2.7][:seeds]
    off = [loss - 4e-8 for loss in plain]
    on = [loss - 4e-5 for loss in plain]
    same, *others = compare_pairs(keyed({"plain": plain, "off": off, "on": on}))
    assert (same.difference, same.verdict, same.seeds_needed) == (0, "the same", None)
    assert {pair.verdict for pair in others} == {"better" if seeds > 1 else "not shown"}
