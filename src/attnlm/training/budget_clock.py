"""The clock of a run with a budget, and the number of steps that the budget allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from attnlm.config.training import TrainingConfig

# A run gets this much time from now on, or its whole budget if that is shorter, even if the start
# of the process has used up the budget.
_LEAST_SECONDS = 2.0  # seconds
_LEAST_PROGRESS = 1e-9
"""Lower bound of the progress, which avoids division by zero."""


@dataclass
class BudgetClock:
    """The clock of a run with a budget. The run ends when `time.perf_counter` reaches `ends`."""

    ends: float
    closing: float = 0.0
    """Seconds needed after the last step to evaluate, save, measure and draw."""
    _last_read: float | None = None

    @classmethod
    def of(cls, seconds: float, began: float) -> BudgetClock:
        """Return the clock of a command or call that began at `began` and may take `seconds`."""
        return cls(max(began + seconds, time.perf_counter() + min(seconds, _LEAST_SECONDS)))

    def advance(self, progress: float) -> float:
        """Return the current progress of the run, 1 at the end.

        `progress` is the result of the previous call; at the first call, it is 0, or more if the
        run is resumed. The remaining progress (1 minus progress) shrinks in proportion to the
        remaining time. Time counts from the first call on, since the first step is slower than
        others.
        """
        now = time.perf_counter()
        since = now if self._last_read is None else self._last_read
        self._last_read = now
        seconds_left = self.ends - self.closing - now
        if seconds_left <= 0:
            return 1.0
        return 1 - (1 - progress) * seconds_left / (seconds_left + now - since)


def expected_steps(config: TrainingConfig, made: int, progress: float) -> float:
    """Return the number of steps of a run, which is estimated if the run has a budget.

    `progress` is the fraction of the budget that the first `made` steps have used.
    """
    if config.budget is None:
        return config.max_steps
    return max(made, 1) / max(progress, _LEAST_PROGRESS)
