"""Events of the training loop, the time of a run, and its speed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from attnlm.base.events import OnEvent
from attnlm.config.training import TrainingConfig
from attnlm.training.budget_clock import expected_steps
from attnlm.training.events import Stepped
from attnlm.training.learning_rate import learning_rate
from attnlm.training.run_schedule import RunSchedule
from attnlm.training.state import TrainingState
from attnlm.training.step import Stepper

_SECONDS_BETWEEN_REPORTS = 0.1
_REPORT_FRACTION = 0.01
"""The largest fraction of the wall time that reports may take."""


class Stopwatch:
    """The wall time of a run, and its speed since the last `restart`. Listeners do not count."""

    def __init__(self, state: TrainingState, tokens_per_step: int) -> None:
        self._state = state
        self._tokens_per_step = tokens_per_step
        self._began = time.perf_counter() - state.seconds
        self.restart()

    def restart(self) -> None:
        """Measure the speed from now on."""
        self._since_step = self._state.step
        self._since = time.perf_counter()

    def seconds(self) -> float:
        """Return the wall time of the run so far."""
        return time.perf_counter() - self._began

    def tokens_per_second(self) -> float:
        """Return the speed of the steps since the last `restart`."""
        tokens = (self._state.step - self._since_step) * self._tokens_per_step
        return tokens / max(1e-9, time.perf_counter() - self._since)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, stop the watch."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self._began += spent
        self._since += spent


@dataclass
class Reporter:
    """Reports events to a listener: each one of `tell`, and Stepped every 0.1 s or less often."""

    training: TrainingConfig
    stepper: Stepper
    run_schedule: RunSchedule
    watch: Stopwatch
    on_event: OnEvent

    def __post_init__(self) -> None:
        is_main = self.stepper.processes.is_main  # only rank 0 reports
        self._due = time.perf_counter() + _SECONDS_BETWEEN_REPORTS if is_main else math.inf

    def tell(self, event: object) -> None:
        """Report an event."""
        with self.watch.paused():
            self.on_event(event)

    def stepped(self, loss: Tensor) -> None:
        """Report a step if a report is due."""
        began = time.perf_counter()
        if began < self._due:
            return
        self.stepper.check_loss()
        state = self.stepper.state
        speed = self.watch.tokens_per_second()
        steps = expected_steps(self.training, state.step, state.progress)
        norm = state.optimizer.norm()
        event = Stepped(
            step=state.step,
            loss=loss.item(),
            tokens_per_second=speed,
            seconds_left=self.run_schedule.seconds_left(speed),
            gradient_norm=None if norm is None else norm.item(),
            learning_rate=learning_rate(state.step, self.training, steps),
            steps=round(steps),
        )
        cost = time.perf_counter() - began
        self._due = began + max(_SECONDS_BETWEEN_REPORTS, cost / _REPORT_FRACTION)
        self.tell(event)
