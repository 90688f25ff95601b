"""Judge differences between losses of several seeds: intervals by Student's t, verdicts by Holm.

docs/insight.md explains the method and names its sources. The distribution of t: Abramowitz and
Stegun (1964), 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FALSE_CLAIMS = 0.05
"""The largest probability that a ladder of equal rungs claims any difference."""
_ROUNDING = 1e-5
"""Losses that differ by at most this fraction are the same: sums in another order differ so."""


@dataclass(frozen=True)
class Pair:
    """The comparison of a rung with a rival, an earlier rung, over the same seeds."""

    rung: str
    rival: str
    difference: float
    """the mean over the seeds of the rival's loss minus the rung's loss, in nats per token"""
    interval: tuple[float, float] | None
    """of 95%, or more if the ladder has other pairs; None for one seed"""
    verdict: str
    """better or worse, if the interval excludes 0: the rung than its rival; `the same`, if losses
    differ by rounding only; else `not shown`"""
    seeds_needed: int | None
    """the seeds that show such a difference with a probability of 80%; None if it is shown, if its
    spread is unknown (one seed), if they are over 100, and if there is no difference"""


def compare_pairs(losses: Mapping[str, Sequence[float]]) -> list[Pair]:
    """Return the comparison of each rung with each earlier one.

    `losses` has each rung's losses, in the order of the seeds. The probability that any verdict on
    equal rungs is better or worse is at most 5%. For this, the pair whose difference is the
    clearest of m gets an interval of 1 − 0.05/m, the next one of 1 − 0.05/(m − 1), and so on; from
    the first interval that includes 0 on, the level stays the same.
    """
    pairs = {
        (rung, rival): [
            0.0 if math.isclose(a, b, rel_tol=_ROUNDING) else b - a
            for a, b in zip(losses[rung], losses[rival], strict=True)
        ]
        for rival, rung in itertools.combinations(losses, 2)
    }
    otherwise = {names: "not shown" if any(d) else "the same" for names, d in pairs.items()}
    compared = {n: Pair(*n, d[0], None, otherwise[n], None) for n, d in pairs.items()}
    seeds = min(map(len, losses.values()))
    if seeds < 2:
        return list(compared.values())
    pairs_left = len(pairs)
    is_shown = True
    for names, differences in sorted(pairs.items(), key=lambda pair: -abs(_effect_size(pair[1]))):
        tails = FALSE_CLAIMS / pairs_left
        low, high = interval(differences, tails)
        is_shown = is_shown and not low <= 0 <= high
        pairs_left -= is_shown
        verdict = ("better" if low > 0 else "worse") if is_shown else otherwise[names]
        needed = None if is_shown else _seeds_needed(abs(_effect_size(differences)), tails)
        compared[names] = Pair(*names, (low + high) / 2, (low, high), verdict, needed)
    return list(compared.values())


def interval(values: Sequence[float], tails: float = FALSE_CLAIMS) -> tuple[float, float]:
    """Return the interval that misses the mean of a normal distribution with probability `tails`.

    `values` are at least two draws from the distribution.
    """
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = t_quantile(tails, len(values) - 1) * error
    return mean - half, mean + half


def _effect_size(differences: Sequence[float]) -> float:
    """Return the mean difference in standard deviations of the differences."""
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences)
    return mean / spread if spread else math.copysign(math.inf, mean) if mean else 0.0


def _seeds_needed(effect: float, tails: float) -> int | None:
    """Return the seeds that find a mean difference of `effect` standard deviations with a
    probability of 80%; None if over 100."""
    for seeds in range(2, 101):
        if t_quantile(tails, seeds - 1) + t_quantile(0.4, seeds - 1) <= effect * math.sqrt(seeds):
            return seeds
    return None


@functools.cache
def t_quantile(tails: float, freedom: int) -> float:
    """Return the value that |t| exceeds with the probability `tails`.

    `freedom` are the degrees of freedom of t, a whole number from 1 on.
    """
    low, high = 0.0, math.pi / 2  # an angle, whose tangent is t/√freedom
    for _ in range(60):
        angle = (low + high) / 2
        total = 0.0
        cosine = math.cos(angle)
        term = cosine if freedom % 2 else 1.0
        for power in range(freedom % 2, freedom - 1, 2):
            total += term
            term *= cosine * cosine * (power + 1) / (power + 2)
        within = math.sin(angle) * total
        within = 2 / math.pi * (angle + within) if freedom % 2 else within
        low, high = (angle, high) if within < 1 - tails else (low, angle)
    return math.tan(high) * math.sqrt(freedom)
