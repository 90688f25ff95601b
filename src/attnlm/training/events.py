"""Events that training reports. `str` of an event is a line to print."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnlm.base.formatting import duration, quantity
from attnlm.runs.journal import EvaluationRecord, Snapshot
from attnlm.runs.run import Run

if TYPE_CHECKING:
    from attnlm.compute.device import Device  # loads torch


@dataclass(frozen=True)
class Started:
    """The run in `run.path` is about to make step `first_step` + 1."""

    run: Run
    device: Device
    first_step: int
    memory: int
    """The estimated memory of the run in bytes."""

    def __str__(self) -> str:
        return (
            f"{self.run.name}: {self.run.config.spec.name}, {self.run.parameters:,} parameters; "
            f"step {self.first_step:,} of {self.run.config.training.length_text}; "
            f"{self.device.name}, "
            f"about {quantity(self.memory, 'B')}"
        )


@dataclass(frozen=True)
class Stepped:
    """Progress, reported a few times a second. `loss` is the newest batch's, in nats per token.

    `seconds_left` is estimated from the speed of the latest steps and evaluations; with a budget,
    it is the time until the budget ends. `steps` is the number of steps in the whole run; with a
    budget, it is estimated from the progress so far.
    """

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    gradient_norm: float | None = None
    """Norm of the batch's whole gradient before clipping; None if not computed."""
    learning_rate: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f}"
        return (
            f"step {self.step:>6}  batch {self.loss:.4f}{speed:>31} tokens/s"
            f"  {duration(self.seconds_left, 2):>9} left"
        )


@dataclass(frozen=True, kw_only=True)
class Evaluated(EvaluationRecord):
    """An evaluation that was written to disk; losses are in nats per token."""

    improved: bool
    """True if the validation loss is the lowest so far"""
    snapshot: Snapshot | None = field(default=None, repr=False)
    """a sample and attention maps"""
    is_last: bool = False
    """True if the run ends here"""

    def __str__(self) -> str:
        """Return `step    100  train 2.6485  validation 2.4236*  …`; a star marks the best."""
        train = "  –   " if self.train_loss is None else format(self.train_loss, ".4f")
        speed = f"{self.tokens_per_second:,}" if self.tokens_per_second else "–"
        return (
            f"step {self.step:>6}"
            f"  train {train}"
            f"  validation {self.val_loss:.4f}{'*' if self.improved else ' '}"
            f"{'' if self.accuracy is None else f'  {self.accuracy:>6.1%} right'}"
            f"  {speed:>9} tokens/s"
            f"  {self.seconds:>7.1f} s"
        )


@dataclass(frozen=True)
class Finished:
    """The end of a run, at its last step or earlier because patience ran out."""

    run: Run
    step: int
    out_of_patience: bool

    def __str__(self) -> str:
        why = ", because of `patience`" if self.out_of_patience else ""
        return f"{self.run.name}: finished at step {self.step:,}{why}"
