"""Full and failing disks: the system's answer to each thing done to a file is an error."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.trials.children import Outcome, before_each_event, in_child, in_own_process
from tests.trials.scenarios import Scenario, events_of, scenarios
from tests.trials.trial import Tally, Trial

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_TAKES_ROOM = ("write", "open", "fsync", "os.mkdir")


def _run(tally: Tally, folder: Path) -> None:
    faults = list(_faults(list(scenarios(("multi-head",), folder)), folder))
    for (scenario, number, event, error, stays), _ in tally.chosen(faults, tally.wanted):
        place = folder / "case"
        scenario.begin(place)
        outcome = in_child(lambda s=scenario, f=(number, error, stays): _act(s, place, *f))  # type: ignore[misc] # noqa: B023
        failure = _not_told(outcome) or scenario.failure(place)
        what = f"{errno.errorcode[error]} {'from' if stays else 'at'} event {number}, {event}"
        tally.count(failure, f"{scenario.name}, {what}")
        shutil.rmtree(place)


def _faults(
    written: list[Scenario], folder: Path
) -> Iterator[tuple[Scenario, int, str, int, bool]]:
    """Every event with every error: once, and from then on, as a disk that is full stays full."""
    for scenario in written:
        for number, event in enumerate(events_of(scenario, folder / "counted")):
            for error, stays in itertools.product(_ERRORS, (False, True)):
                yield scenario, number, event, error, stays


def _act(scenario: Scenario, place: Path, number: int, error: int, stays: bool) -> None:
    numbers = itertools.count()

    def fail(event: str) -> None:
        now = next(numbers)
        if now == number or (stays and now > number and event.startswith(_TAKES_ROOM)):
            raise OSError(error, os.strerror(error))

    before_each_event(place, fail)
    scenario.act(place)


def _not_told(outcome: Outcome) -> str | None:
    """Where the child neither did its work nor told in one line why not."""
    told = outcome.error or ""
    if outcome.signum is None and (
        not told or (told.startswith("AttnlmError: can't write") and "\n" not in told)
    ):
        return None
    return told or f"signal {outcome.signum}"


TRIAL = Trial(
    name="disk",
    promise="a disk that fails at any write: one line of error, the last checkpoint loads",
    short=30,
    full=500,
    run=in_own_process(_run),
    skip=lambda: None if sys.platform == "linux" else "it counts what Linux does",
)


# --- A disk that is really full -------------------------------------------------------------------


def _run_full(tally: Tally, folder: Path) -> None:
    """A small tmpfs with less room from case to case, and one that can't be written."""
    written = list(scenarios(("multi-head",), folder))
    for case, _ in tally.drawn(tally.wanted):
        scenario = written[case % len(written)]
        place = folder / "case"
        place.mkdir()
        _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place))
        try:
            scenario.begin(place)
            blocks = sum(-(-p.stat().st_size // 4096) for p in place.rglob("*") if p.is_file())
            # The first of all cannot be written at all; the others have some pages left.
            left = case // len(written)
            room = f"size={4096 * (blocks + left)}" if left else "ro"
            _mount("-o", f"remount,{room}", str(place))
            outcome = in_child(lambda s=scenario: s.act(place))  # type: ignore[misc] # noqa: B023
            _mount("-o", "remount,rw,size=8m", str(place))
            failure = _not_told(outcome) or scenario.failure(place)
            tally.count(failure, f"{scenario.name}, {room}")
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
            place.rmdir()


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def _why_not() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "mounting a small disk needs Linux and its root user"
    with tempfile.TemporaryDirectory() as place:
        try:
            _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", place)
        except (OSError, subprocess.CalledProcessError):
            return "mounting a small disk is not allowed here"
        subprocess.run(["umount", place], check=True)
    return None


FULL = Trial(
    name="full-disk",
    promise="a disk that is full or read-only: one line of error, the last checkpoint loads",
    short=8,
    full=80,
    run=in_own_process(_run_full),
    skip=_why_not,
)
