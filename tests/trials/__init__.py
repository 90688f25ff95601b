"""Trials: what attnlm promises to survive, tried many times over and counted, from fixed seeds.

`make trials` makes them all, in full; `make test` a short form of each.
"""

from __future__ import annotations

from tests.trials import anywhere, damage, hostile, input, network
from tests.trials.trial import Trial

_ALL: list[Trial] = [
    anywhere.TRIAL,
    damage.TRIAL,
    hostile.TRIAL,
    input.TRIAL,
    network.TRIAL,
]

TRIALS = {trial.name: trial for trial in _ALL}
