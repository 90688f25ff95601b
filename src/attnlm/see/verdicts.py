"""Judge differences between losses of several seeds: intervals by Student's t, verdicts by Holm.

Groups of runs with the same seeds are compared pair by pair of runs, others by Welch's test (1947).
Among three groups or more, the spreads of paired differences are moderated (Smyth, 2004): each
borrows from the others. docs/insight.md explains the method and names its sources.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FALSE_CLAIMS = 0.05
"""The largest probability that a comparison of equal groups claims any difference."""
_ROUNDING = 1e-5
"""Losses that differ by at most this fraction are the same: sums in another order differ so."""

Losses = Mapping[str, Mapping[Any, float]]
"""The loss of each run of each group. Runs with the same key in two groups are a pair."""


@dataclass(frozen=True)
class Pair:
    """The comparison of a group of runs with a rival."""

    groups: tuple[str, str]
    """the group and its rival"""
    difference: float
    """by how much the group is better: the rival's mean loss minus the group's; of accuracies, the
    group's mean minus the rival's"""
    interval: tuple[float, float] | None
    """of 95%, or more if there are other pairs; None for one seed"""
    verdict: str
    """better or worse, if the interval excludes 0: the group than its rival; `the same`, if losses
    differ by rounding only; else `not shown`"""
    seeds_needed: int | None
    """the seeds that show such a difference with a probability of 80%; None if it is shown, if its
    spread is unknown (one seed), if they are over 100, and if there is no difference"""
    p: float | None = None
    """the probability of such a difference, or a larger one, between equal groups; not corrected
    for the number of pairs; None for one seed"""
    paired: bool = True
    """set if runs were compared seed by seed; else by Welch's test"""


class _Difference(NamedTuple):
    """The mean difference of two groups, and what is known about its error."""

    mean: float
    variance: float
    """of a mean of one run of each group"""
    error: float
    """the standard error of `mean`"""
    freedom: float
    """the degrees of freedom of `error`"""
    growth: float
    """the degrees of freedom that each seed more adds"""
    paired: bool

    @property
    def is_rounding(self) -> bool:
        return self.paired and not self.mean and not self.variance

    @property
    def p(self) -> float:
        if self.error:
            return t_tails(self.mean / self.error, self.freedom)
        return float(self.mean == 0)


def compare_pairs(
    losses: Losses, baseline: str | None = None, *, are_shares: bool = False
) -> list[Pair]:
    """Return the comparison of each group with each earlier one or, if given, with the baseline.

    The probability that any verdict on equal groups is better or worse is at most 5%. For this, the
    pair whose difference is the clearest of m gets an interval of 1 − 0.05/m, the next one of
    1 − 0.05/(m − 1), and so on; from the first interval that includes 0 on, the level stays the
    same. Where losses `are_shares` of few answers, equal differences may be chance: they show no
    spread.
    """
    names = sorted(losses, key=lambda name: name != baseline)  # the baseline comes first
    differences = {
        (group, rival): _difference(losses[group], losses[rival])
        for rival, group in itertools.combinations(names, 2)
    }
    # The pairs share groups: simulations of groups with unequal noise gave the limits
    # (docs/insight.md). A noisy baseline is in all pairs, so that less is borrowed there.
    borrowed = min((len(losses) - 2) / 2, 1.5)
    if baseline is not None:
        borrowed = min(0.15 * (len(losses) - 2), 0.5)
    differences = _moderated(differences, borrowed)
    if baseline is not None:
        differences = {both: d for both, d in differences.items() if both[1] == baseline}
    return _judged(differences, are_shares)


def compare_by_task(scores: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[Pair]:
    """Return the comparison of a candidate with the standard in each task, seed by seed.

    `scores` are those of both, of which higher ones are better. Tasks share no runs, so that their
    spreads may borrow more from each other than those of pairs with a baseline: one degree of
    freedom, and less of few tasks. Simulations with the spreads of the exam's tasks gave that.
    """
    differences = {}
    for task, sides in scores.items():
        candidate, standard = (dict(enumerate(-score for score in side)) for side in sides)
        differences[task, ""] = _difference(candidate, standard)
    seeds = max((len(candidate) for candidate, _ in scores.values()), default=0)
    borrowed = min((len(scores) - 2) / 14, 1) / max(1, seeds - 1)
    return _judged(_moderated(differences, borrowed))


def _judged(
    differences: Mapping[tuple[str, str], _Difference], are_shares: bool = False
) -> list[Pair]:
    compared = {}
    pairs_left = len(differences)
    is_shown = True
    for both, d in sorted(differences.items(), key=lambda item: item[1].p):
        verdict = "the same" if d.is_rounding else "not shown"
        found = needed = p = None
        if d.freedom and (d.error or d.is_rounding or not are_shares):
            p = d.p
            tails = FALSE_CLAIMS / pairs_left
            is_shown = is_shown and p < tails
            pairs_left -= is_shown
            half = t_quantile(tails, d.freedom) * d.error
            found = (d.mean - half, d.mean + half)
            if is_shown:
                verdict = "better" if d.mean > 0 else "worse"
            else:
                needed = _seeds_needed(d, tails)
        compared[both] = Pair(both, d.mean, found, verdict, needed, p, d.paired)
    return [compared[both] for both in differences]


def interval_text(interval: tuple[float, float] | None, format: str = "z.4f") -> str:
    """Return `−0.0123 to 0.0456`; "" for None."""
    if interval is None:
        return ""
    return f"{interval[0]:{format}} to {interval[1]:{format}}".replace("-", "−")


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of a normal distribution; None for one draw from it."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = t_quantile(FALSE_CLAIMS, len(values) - 1) * error
    return mean - half, mean + half


def p_at_most(values: Sequence[float], target: float) -> float:
    """Return the probability that at least two draws from a normal distribution have such a mean,
    or a lower one, if the mean of the distribution is `target`."""
    excess = statistics.fmean(values) - target
    if not (spread := statistics.stdev(values)):
        return float(excess > 0)
    tails = t_tails(excess / spread * math.sqrt(len(values)), len(values) - 1) / 2
    return tails if excess < 0 else 1 - tails


def _difference(group: Mapping[Any, float], rival: Mapping[Any, float]) -> _Difference:
    """Return the rival's mean minus the group's: of pairs, or as Welch does of two samples."""
    paired = group.keys() == rival.keys()
    samples = [[-loss for loss in group.values()], [*rival.values()]]
    if paired:
        pairs = [(group[key], rival[key]) for key in group]
        samples = [[0.0 if math.isclose(a, b, rel_tol=_ROUNDING) else b - a for a, b in pairs]]
    mean = math.fsum(map(statistics.fmean, samples))
    sizes = [*map(len, samples)]
    if min(sizes) < 2:
        return _Difference(mean, 0.0, 0.0, 0.0, 0.0, paired)
    variances = [*map(statistics.variance, samples)]
    parts = [variance / n for variance, n in zip(variances, sizes, strict=True)]
    freedom = growth = float(sum(sizes) - len(sizes))
    if any(parts):
        freedom = sum(parts) ** 2 / sum(p**2 / (n - 1) for p, n in zip(parts, sizes, strict=True))
        growth = sum(variances) ** 2 / sum(variance**2 for variance in variances)
    error = math.sqrt(sum(parts))
    # Rounded, so that it is the same whole number for all paired samples of one size.
    return _Difference(mean, sum(variances), error, round(freedom, 9), growth, paired)


def _moderated(
    differences: dict[tuple[str, str], _Difference], borrowed: float
) -> dict[tuple[str, str], _Difference]:
    """Return paired differences whose variances are drawn towards those of the others.

    The prior's degrees of freedom are at most `borrowed` times those of a difference.
    """
    known = [d for d in differences.values() if d.variance]
    own = known[0].freedom if known else 0
    if len(known) < 2 or not all(d.paired and d.freedom == own for d in known):
        return differences
    logs = [math.log(d.variance) - _digamma(own / 2) + math.log(own / 2) for d in known]
    spread = statistics.variance(logs) - _zeta(2, own / 2)
    prior, log_usual = borrowed * own, statistics.fmean(logs)
    if spread > 0:
        estimated = 2 * _inverse_trigamma(spread)
        log_usual += _digamma(estimated / 2) - math.log(estimated / 2)
        prior = min(borrowed * own, estimated)
    usual = math.exp(log_usual)
    moderated = {}
    for names, d in differences.items():
        variance = (prior * usual + own * d.variance) / (prior + own)
        error = math.sqrt(variance / (own + 1))
        drawn = d._replace(variance=variance, error=error, freedom=prior + own)
        moderated[names] = drawn if d.freedom and not d.is_rounding else d
    return moderated


def _seeds_needed(difference: _Difference, tails: float) -> int | None:
    """Return the seeds that find such a difference with a probability of 80%; None if over 100."""
    if not difference.variance:
        return None
    effect = abs(difference.mean) / math.sqrt(difference.variance)
    n = round(difference.variance / difference.error**2)

    def shows(seeds: int) -> bool:
        freedom = max(difference.freedom + difference.growth * (seeds - n), difference.growth)
        found = t_quantile(tails, freedom) + t_quantile(0.4, freedom)
        return found <= effect * math.sqrt(seeds)

    seeds = bisect.bisect_left(range(2, 101), True, key=shows) + 2
    return seeds if seeds <= 100 else None


# --- Distributions --------------------------------------------------------------------------------

# Student's t is √ν sinh(y), where the density of y is proportional to cosh(y)^−ν. Areas under it
# are sums over these steps, which are doubly exponential: their error is that of rounding.
_W = np.arange(-4, 5, 1 / 8)
_STEPS = np.exp(_W - np.exp(-_W))
_WIDTHS = _STEPS * (1 + np.exp(-_W)) / 8
_TERMS = np.arange(4000.0)


def _area(y: float, freedom: float) -> float:
    """Return √ν times the area under cosh^−ν from `y` on."""
    at = y + _STEPS / math.sqrt(freedom)
    return float(_WIDTHS @ np.exp(-freedom * (np.logaddexp(at, -at) - math.log(2))))


def t_tails(t: float, freedom: float) -> float:
    """Return the probability that Student's |t| exceeds `t`, for any degrees of freedom above 0."""
    return _area(math.asinh(abs(t) / math.sqrt(freedom)), freedom) / _area(0.0, freedom)


@functools.cache
def t_quantile(tails: float, freedom: float) -> float:
    """Return the value that |t| exceeds with the probability `tails`."""
    y, whole, root = 0.0, _area(0.0, freedom), math.sqrt(freedom)
    for _ in range(10):  # Newton's method for the logarithm of the area, which is concave
        area = _area(y, freedom)
        y += area / root * math.log(area / whole / tails) * math.cosh(y) ** freedom
    return math.sinh(y) * root


def _digamma(x: float) -> float:
    """Return the derivative of ln Γ."""
    return math.log(x + len(_TERMS) - 0.5) - float(np.sum(1 / (x + _TERMS)))


def _zeta(power: int, x: float) -> float:
    """Return Hurwitz's zeta function; that of 2 is the second derivative of ln Γ."""
    rest = (x + len(_TERMS) - 0.5) ** (1 - power) / (power - 1)
    return rest + float(np.sum((x + _TERMS) ** -power))


def _inverse_trigamma(y: float) -> float:
    """Return x with ζ(2, x) = y > 0, by Newton's method for 1/ζ, which is convex."""
    x = 0.5 + 1 / y
    for _ in range(20):
        x -= (1 - _zeta(2, x) / y) * _zeta(2, x) / (2 * _zeta(3, x))
    return x
