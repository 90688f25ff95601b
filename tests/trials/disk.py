"""Full and failing disks: the system's answer to each thing done to a file is an error."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.models import contents
from tests.trials import small
from tests.trials.anywhere import COMMANDS
from tests.trials.children import Outcome, before_each_event, command_in_child, in_child
from tests.trials.scenarios import Scenario, events_of, scenarios
from tests.trials.trial import Tally, Trial, not_linux

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


# --- A disk that is really full -------------------------------------------------------------------


def _why_not() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "mounting a small disk needs Linux and its root user"
    try:
        with tempfile.TemporaryDirectory() as folder, _small_disk(Path(folder) / "disk"):
            return None
    except (OSError, subprocess.CalledProcessError):
        return "mounting a small disk is not allowed here"


@Trial("full-disk", short=10, full=160, skip=_why_not, forks=True)
def _full_disk(tally: Tally, folder: Path) -> None:
    """A disk that is full or read-only: one line of error, the last checkpoint loads.

    The disk is a tmpfs, with more room from case to case.
    """
    written = list(scenarios(("multi-head",), folder))
    in_child(small.make_all, folder / "whole")
    for number, _ in tally.drawn(tally.wanted):
        case, is_command = divmod(number, 2)
        if is_command:
            name, left = list(COMMANDS)[case % len(COMMANDS)], case // len(COMMANDS)
            fault = _on_a_full_disk(COMMANDS[name], left, folder)
            tally.count(fault, f"{name}, {left} pages left")
            continue
        scenario, left = written[case % len(written)], case // len(written)
        place = folder / "case"
        with _small_disk(place):
            scenario.begin(place)
            room = _leave(place, left)
            outcome = in_child(scenario.act, place)
            _mount("-o", "remount,rw,size=8m", str(place))
            failure = _unexplained(outcome) or scenario.failure(place)
            tally.count(failure, f"{scenario.name}, {room}")


def _on_a_full_disk(command: list[str], left: int, folder: Path) -> str | None:
    """Return what goes wrong if a command is run on a disk with so many pages left."""
    place = folder / "case"

    def use_it_for_temporary_files() -> None:
        os.environ["TMPDIR"], tempfile.tempdir = str(place), None

    with _small_disk(place):
        shutil.copytree(folder / "whole", place, dirs_exist_ok=True)
        before = _contents(place)
        _leave(place, left)
        done, fault = command_in_child(command, place, use_it_for_temporary_files)
        after = _contents(place)
    if fault or b"" in after.values():
        return fault or "an empty file is left"
    changed = done.code and before.items() - after.items()
    return "it failed, and changed what was there" if changed else None


def _contents(place: Path) -> dict[str, bytes]:
    """Return all files but those that a new run changes from its first moment on."""
    changing = ("latest", ".jsonl")
    return {name: there for name, there in contents(place).items() if not name.endswith(changing)}


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[None]:
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def _leave(place: Path, pages: int) -> str:
    """Leave so many free pages, or with none, nothing that can be written at all."""
    taken = sum(-(-p.stat().st_size // 4096) for p in place.rglob("*") if p.is_file())
    room = f"size={4096 * (taken + pages)}" if pages else "ro"
    _mount("-o", f"remount,{room}", str(place))
    return room


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
