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

FALSE_CLAIMS = 0.05
"""The largest probability that a ladder of equal rungs claims any difference."""
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
    is_rounding: bool

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
    differences = _moderated(differences, len(losses), baseline is not None)
    if baseline is not None:
        differences = {both: d for both, d in differences.items() if both[1] == baseline}
    compared = {}
    pairs_left = len(differences)
    is_shown = True
    for both, d in sorted(differences.items(), key=lambda item: item[1].p):
        otherwise = "the same" if d.is_rounding else "not shown"
        if not d.freedom or (are_shares and not d.error and not d.is_rounding):
            compared[both] = Pair(both, d.mean, None, otherwise, None, None, d.paired)
            continue
        tails = FALSE_CLAIMS / pairs_left
        is_shown = is_shown and d.p < tails
        pairs_left -= is_shown
        verdict = ("better" if d.mean > 0 else "worse") if is_shown else otherwise
        half = t_quantile(tails, d.freedom) * d.error
        needed = None if is_shown else _seeds_needed(d, tails)
        found = (d.mean - half, d.mean + half)
        compared[both] = Pair(both, d.mean, found, verdict, needed, d.p, d.paired)
    return [compared[both] for both in differences]


def interval_text(interval: tuple[float, float] | None, format: str = "z.4f") -> str:
    """Return `−0.0123 to 0.0456`; "" for None."""
    if interval is None:
        return ""
    return f"{interval[0]:{format}} to {interval[1]:{format}}".replace("-", "−")


def interval(values: Sequence[float], tails: float = FALSE_CLAIMS) -> tuple[float, float]:
    """Return the interval that misses the mean of a normal distribution with probability `tails`.

    `values` are at least two draws from the distribution.
    """
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = t_quantile(tails, len(values) - 1) * error
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
    is_rounding = paired and not any(samples[0])
    sizes = [*map(len, samples)]
    if min(sizes) < 2:
        return _Difference(mean, 0.0, 0.0, 0.0, 0.0, paired, is_rounding)
    variances = [*map(statistics.variance, samples)]
    parts = [variance / n for variance, n in zip(variances, sizes, strict=True)]
    freedom = growth = float(sum(sizes) - len(sizes))
    if any(parts):
        freedom = sum(parts) ** 2 / sum(p**2 / (n - 1) for p, n in zip(parts, sizes, strict=True))
        growth = sum(variances) ** 2 / sum(variance**2 for variance in variances)
    error = math.sqrt(sum(parts))
    # Rounded, so that it is the same whole number for all paired samples of one size.
    return _Difference(mean, sum(variances), error, round(freedom, 9), growth, paired, is_rounding)


def _moderated(
    differences: dict[tuple[str, str], _Difference], groups: int, to_baseline: bool
) -> dict[tuple[str, str], _Difference]:
    """Return paired differences whose variances are drawn towards those of the others.

    The prior's degrees of freedom have a limit, since the pairs share groups: simulations of groups
    with unequal noise gave it (docs/insight.md). A noisy baseline is in all pairs, so that less is
    borrowed there.
    """
    known = [d for d in differences.values() if d.variance]
    own = known[0].freedom if known else 0
    if len(known) < 2 or not all(d.paired and d.freedom == own for d in known):
        return differences
    most = min((groups - 2) * own / 2, 1.5 * own)
    if to_baseline:
        most = min(0.15 * (groups - 2) * own, own / 2)
    logs = [math.log(d.variance) - _digamma(own / 2) + math.log(own / 2) for d in known]
    spread = statistics.variance(logs) - _trigamma(own / 2)
    prior, log_usual = most, statistics.fmean(logs)
    if spread > 0:
        estimated = 2 * _inverse_trigamma(spread)
        log_usual += _digamma(estimated / 2) - math.log(estimated / 2)
        prior = min(most, estimated)
    usual = math.exp(log_usual)

    def moderated(d: _Difference) -> _Difference:
        if d.is_rounding or not d.freedom:
            return d
        variance = (prior * usual + own * d.variance) / (prior + own)
        error = math.sqrt(variance / (own + 1))
        return d._replace(variance=variance, error=error, freedom=prior + own)

    return {names: moderated(d) for names, d in differences.items()}


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


def t_tails(t: float, freedom: float) -> float:
    """Return the probability that Student's |t| exceeds `t`, for any degrees of freedom above 0."""
    return _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5)


@functools.cache
def t_quantile(tails: float, freedom: float) -> float:
    """Return the value that |t| exceeds with the probability `tails`."""
    low, high = 0.0, math.pi / 2  # an angle, whose tangent is t/√freedom
    for _ in range(50):
        angle = (low + high) / 2
        exceeds = _beta_share(math.cos(angle) ** 2, freedom / 2, 0.5) > tails
        low, high = (angle, high) if exceeds else (low, angle)
    return math.tan(high) * math.sqrt(freedom)


def _beta_share(x: float, a: float, b: float) -> float:
    """Return I_x(a, b), the regularised incomplete beta function: DLMF 8.17.22, as Lentz does."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    if x <= 0:
        return 0.0
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    fraction, c, d = 1.0, 1.0, 0.0
    for m in range(500):
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        even = (m + 1) * (b - m - 1) * x / ((a + 2 * m + 1) * (a + 2 * m + 2))
        for part in (odd, even):
            d = 1 / (1 + part * d)
            c = 1 + part / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front / fraction


def _digamma(x: float) -> float:
    """Return the derivative of ln Γ: DLMF 5.5.2, then 5.11.2."""
    below = 0.0
    while x < 10:
        below -= 1 / x
        x += 1
    f = 1 / (x * x)
    series = f * (1 / 12 - f * (1 / 120 - f * (1 / 252 - f * (1 / 240 - f / 132))))
    return below + math.log(x) - 0.5 / x - series


def _trigamma(x: float) -> float:
    """Return the second derivative of ln Γ."""
    below = 0.0
    while x < 10:
        below += 1 / (x * x)
        x += 1
    f = 1 / (x * x)
    return below + 1 / x + f / 2 + f / x * (1 / 6 - f * (1 / 30 - f * (1 / 42 - f / 30)))


def _inverse_trigamma(y: float) -> float:
    """Return x with trigamma(x) = y > 0, which is between 1/x and 1/x + 1/x²."""
    low, high = 1 / y, (1 + math.sqrt(1 + 4 * y)) / (2 * y)
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if _trigamma(x) > y else (low, x)
    return high
