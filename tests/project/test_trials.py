"""The short form of every trial of tests/trials; `make trials` makes the full ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials import TRIALS
from tests.trials.trial import Tally


@pytest.mark.parametrize("name", [name for name in TRIALS if TRIALS[name].short])
def test_a_short_trial_finds_no_failure(name: str, tmp_path: Path) -> None:
    trial = TRIALS[name]
    if (reason := trial.skip()) is not None:
        pytest.skip(reason)
    tally = trial.try_in(tmp_path, short=True)
    assert tally.cases > 0
    assert tally.failures == []


def _numbers(tally: Tally) -> dict[int, tuple[object, float]]:
    """Return each case by number: its item, and the first draw of its generator."""
    tried: dict[int, tuple[object, float]] = {}
    for item, generator in tally.chosen("abcde", 3, first=10):
        tried[tally.number] = (item, generator.random())
    for number, generator in tally.drawn(4, first=15):
        tried[tally.number] = (number, generator.random())
    return tried


def test_a_case_depends_on_its_number_alone() -> None:
    together = _numbers(Tally("kill", seed=7, wanted=9))
    assert len(together) == 7
    assert list(together) == sorted(together)
    assert len({drawn for _, drawn in together.values()}) == 7
    for number, case in together.items():
        assert _numbers(Tally("kill", seed=7, wanted=9, only=number)) == {number: case}
    for other in (Tally("kill", seed=8, wanted=9), Tally("disk", seed=7, wanted=9)):
        assert not set(_numbers(other).values()) & set(together.values())


def test_every_case_has_a_number_also_beyond_those_that_are_wanted() -> None:
    found = [_numbers(Tally("kill", seed=7, wanted=9, only=n)) for n in (9, 10, 14, 15, 99)]
    assert [list(tried) for tried in found] == [[], [10], [14], [15], [99]]
