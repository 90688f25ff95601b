"""The losses that a run is compared with."""

from __future__ import annotations

import math

from attnlm.runs.run import Run


def references_of(run: Run) -> dict[str, float]:
    """Losses to compare a run's with, in nats per token, by their labels: those that are known."""
    known = {
        "guessing, ln V": math.log(run.vocab_size),
        "counted bigram": run.dataset["bigram_loss"],
        "floor": run.dataset["floor"],
    }
    return {label: loss for label, loss in known.items() if loss is not None}
