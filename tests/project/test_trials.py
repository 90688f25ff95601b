"""The short form of every trial of trials; `make trials` makes the full ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from trials import TRIALS


@pytest.mark.parametrize("name", [name for name in TRIALS if TRIALS[name].short])
def test_a_short_trial_finds_no_failure(name: str, tmp_path: Path) -> None:
    trial = TRIALS[name]
    if (reason := trial.skip()) is not None:
        pytest.skip(reason)
    tally = trial.try_in(tmp_path, short=True)
    assert tally.cases > 0
    assert tally.failures == []
