"""Full and failing disks: the system's answer to each thing done to a file is an error."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

from trials.forked_children import Outcome, before_each_event, in_child
from trials.scenarios import Scenario, events_of, scenarios
from trials.trial import Tally, Trial, not_linux

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_TAKES_ROOM = ("write", "open", "fsync", "os.mkdir")


@Trial("disk", short=10, full=500, skip=not_linux, forks=True)
def _disk(tally: Tally, folder: Path) -> None:
    """A disk that fails at any write: one line of error, the last checkpoint loads.

    Every event has every error: once, and from then on, as a disk that is full stays full.
    """
    faults = [
        (scenario, number, event, error, stays)
        for scenario in scenarios(("multi-head",), folder)
        for number, event in enumerate(events_of(scenario, folder))
        for error, stays in itertools.product(_ERRORS, (False, True))
    ]
    for (scenario, number, event, error, stays), _ in tally.chosen(faults, tally.wanted):
        with scenario.begun(folder) as here:
            outcome = in_child(_act, scenario, here, number, error, stays)
            failure = _unexplained(outcome) or scenario.failure(here)
        what = f"{errno.errorcode[error]} {'from' if stays else 'at'} event {number}, {event}"
        tally.count(failure, f"{scenario.name}, {what}")


def _act(scenario: Scenario, place: Path, number: int, error: int, stays: bool) -> None:
    numbers = itertools.count()

    def fail(event: str) -> None:
        now = next(numbers)
        if now == number or (stays and now > number and event.startswith(_TAKES_ROOM)):
            raise OSError(error, os.strerror(error))

    before_each_event(place, fail)
    scenario.act(place)


def _unexplained(outcome: Outcome) -> str | None:
    """Return how a child ended that neither did its work nor explained why not in one line."""
    said = outcome.error or ""
    if said.startswith("AttnlmError: cannot write") and "\n" not in said:
        return None
    return outcome.failure
