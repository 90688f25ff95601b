"""Trials: what attnlm promises to survive, tried many times over and counted.

`make trials` makes them all, in full, from a new seed each day; `make test` a short form of each,
from one that stays. `python -m tests.trials NAME --seed N --case N` tries one case again.
"""

from __future__ import annotations

from tests.trials import (
    anywhere,
    clock,
    damage,
    disk,
    forged,
    hostile,
    input,
    kill,
    machines,
    memory,
    network,
    numbers,
    places,
    resume,
    signals,
    two,
)
from tests.trials.trial import Trial

_ALL: tuple[Trial, ...] = (
    *(kill.TRIAL, disk.TRIAL, disk.FULL, numbers.TRIAL, resume.TRIAL, two.TRIAL, signals.TRIAL),
    *(memory.TRIAL, anywhere.TRIAL, anywhere.TEMPORARY, damage.TRIAL, hostile.TRIAL, forged.TRIAL),
    *(clock.TRIAL, places.TRIAL, input.TRIAL, network.TRIAL, machines.TRIAL),
)
TRIALS = {trial.name: trial for trial in _ALL}
