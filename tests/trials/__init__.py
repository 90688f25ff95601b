"""Trials: what attnlm promises to survive, tried many times over and counted, from fixed seeds.

`make trials` makes them all, in full; `make test` a short form of each.
"""

from __future__ import annotations

from tests.trials import (
    anywhere,
    clock,
    damage,
    disk,
    hostile,
    input,
    kill,
    memory,
    network,
    numbers,
    places,
    resume,
    signals,
    two,
)
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
    anywhere.TRIAL,
    anywhere.TEMPORARY,
    damage.TRIAL,
    hostile.TRIAL,
    clock.TRIAL,
    places.TRIAL,
    input.TRIAL,
    network.TRIAL,
]

TRIALS = {trial.name: trial for trial in _ALL}
