"""Trials: what attnlm promises to survive, tried many times over and counted.

`make trials` makes them all, in full, from a new seed each day; `make test` a short form of each,
from one that stays. `python -m trials NAME --seed N --case N` tries one case again.
"""

import attnlm
from trials import (  # noqa: F401 - each registers its trials
    arbitrary_input,
    damaged_files,
    disk,
    environments,
    hostile_files,
    kill,
    memory,
    not_finite,
    resume,
    signals,
    two_processes,
)
from trials.trial import TRIALS as TRIALS

# Trials fork after this, so that none of their children has to import it.
_loaded = [getattr(attnlm, name) for name in attnlm.__all__]
