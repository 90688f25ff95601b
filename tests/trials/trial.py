"""What every trial is made of: numbered cases, each drawn by itself, and what failed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import TypeVar

from tests.command import forked

_Item = TypeVar("_Item")
Run = Callable[["Tally", Path], None]
TRIALS: dict[str, Trial] = {}

SHORT_SEED = 1
"""The seed of every short form, so that `make test` is the same each time."""


@dataclass
class Tally:
    """Which cases of a trial to try; how many were tried, and one line on each that failed.

    A case has a number and a generator of its own, made from (seed, trial, number), so that it can
    be tried without those before it.
    """

    trial: str
    seed: int
    wanted: int
    """About how many cases."""
    only: int | None = None
    """The number of the one case to try, None for all that are wanted."""
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    number: int = 0
    """The number of the current case."""

    def chosen(
        self, items: Sequence[_Item], wanted: int, first: int = 0
    ) -> Iterator[tuple[_Item, Random]]:
        """Yield each item with its generator, or a sample of `wanted`; numbers begin at `first`."""
        numbers: Sequence[int] = range(len(items))
        if self.only is None and wanted < len(items):
            sampled = Random(f"{self.seed} {self.trial} from {first}").sample(numbers, wanted)
            numbers = sorted(sampled)
        for number in numbers:
            self.number = first + number
            if self.only in (None, self.number):
                yield items[number], Random(f"{self.seed} {self.trial} {self.number}")

    def drawn(self, wanted: int, first: int = 0) -> Iterator[tuple[int, Random]]:
        """Yield 0, 1, … with their generators; the numbers of the cases begin at `first`."""
        most = wanted if self.only is None else self.only + 1
        yield from self.chosen(range(most), most, first)

    def count(self, failure: str | None, what: str) -> None:
        """Count a case in which `what` was tried; `failure` is None if the promise was kept."""
        self.cases += 1
        if failure is not None:
            self.failures.append(f"case {self.number}: {what}: {failure}")


@dataclass(frozen=True)
class Trial:
    """One promise, and how it is tried."""

    name: str
    promise: str
    run: Run
    short: int
    full: int
    skip: Callable[[], str | None]
    forks: bool
    draws: bool

    def try_in(
        self, folder: Path, *, short: bool = False, seed: int = SHORT_SEED, only: int | None = None
    ) -> Tally:
        """Try its short or full form, or one case of that alone, in the empty `folder`."""
        tally = Tally(self.name, seed, self.short if short else self.full, only)
        if not self.forks:
            self.run(tally, folder)
            return tally
        server = forked()
        results, sender = server.Pipe(duplex=False)
        arguments = (self.run, tally, folder, self.draws, sender)
        server.Process(target=_try_and_send, args=arguments, daemon=True).start()
        sender.close()  # then the end of the process ends `recv`
        tried: Tally = results.recv()
        return tried


def _try_and_send(run: Run, tally: Tally, folder: Path, draws: bool, sender: Connection) -> None:
    if draws:
        import matplotlib.figure  # noqa: F401 - once for all children
    else:
        from attnlm.base import files
        from attnlm.see import curves

        curves.draw_run = lambda run, path: files.write_bytes(path, b"a picture")
    os.dup2(2, 1)  # stdout is for the table of results
    run(tally, folder)
    sender.send(tally)


def trial(
    name: str,
    *,
    short: int,
    full: int,
    skip: Callable[[], str | None] = lambda: None,
    forks: bool = False,
    draws: bool = False,
) -> Callable[[Run], Run]:
    """Make a trial of a function; the first line of its docstring is the promise.

    The function tries the cases that its Tally wants, in an empty folder, and counts them: about
    `short` cases in `make test`, if any, and `full` in `make trials`. `skip` returns the reason if
    this machine can't try them. With `forks` the function is called in a new process, without
    threads, in which a run's curve is drawn only with `draws`: that takes longer than a run.
    """

    def register(run: Run) -> Run:
        promise = str(run.__doc__).splitlines()[0].rstrip(".")
        TRIALS[name] = Trial(name, promise, run, short, full, skip, forks, draws)
        return run

    return register


def not_linux() -> str | None:
    """Return the reason to skip a trial that needs Linux."""
    return None if sys.platform == "linux" else "it needs Linux"


def not_posix() -> str | None:
    """Return the reason to skip a trial that forks, or makes links, pipes and devices."""
    return None if os.name == "posix" else "Windows has no forks, pipes and devices"


@contextlib.contextmanager
def place(folder: Path, like: Path | None = None) -> Iterator[Path]:
    """Yield the folder of one case, empty or a copy of `like`, and remove it afterwards."""
    made = folder / "case"
    if like is None:
        made.mkdir()
    else:
        shutil.copytree(like, made)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
