"""Trials: what attnlm promises to survive, tried many times over and counted, from fixed seeds.

`make trials` makes them all, in full; `make test` a short form of each.
"""

from __future__ import annotations

from tests.trials import disk, kill, memory, numbers, resume, signals, two
from tests.trials.trial import Trial

_ALL: list[Trial] = [
    kill.TRIAL,
    disk.TRIAL,
    disk.FULL,
    numbers.TRIAL,
    resume.TRIAL,
    two.TRIAL,
    signals.TRIAL,
    memory.TRIAL,
]

TRIALS = {trial.name: trial for trial in _ALL}
