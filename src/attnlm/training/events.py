"""What training reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnlm.compute.device import Device
from attnlm.runs.run import Run
from attnlm.runs.ticker import Snapshot


@dataclass(frozen=True)
class Started:
    """The run in `run.path` is about to make step `first_step` + 1."""

    run: Run
    device: Device
    first_step: int
    memory: int
    """Bytes that it will take, about."""


@dataclass(frozen=True)
class Stepped:
    """Reported a few times a second, with the newest batch's loss in nats per token.

    `seconds_left` is for the steps to come and their evaluations, at the pace of the latest ones.
    """

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    gradient_norm: float | None = None
    """Of the whole gradient of that batch, before it was clipped; None where it was not taken: of a
    sharded model it takes all processes, and is taken for clipping only"""


@dataclass(frozen=True)
class Replanned:
    """After `step`, the time that is left holds another number of steps: that of `run`'s config."""

    run: Run
    step: int


@dataclass(frozen=True)
class Evaluated:
    """An evaluation was made and is on disk; `record` is its line of metrics.jsonl."""

    record: dict[str, Any]
    improved: bool
    snapshot: Snapshot | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Finished:
    """The run ended at its last step, or before it since patience ran out."""

    run: Run
    step: int
    out_of_patience: bool
