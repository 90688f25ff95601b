"""The parts of a trial: numbered cases, each with its own generator, and the failures."""

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
from unittest import mock

from attnlm.base import files
from attnlm.see import curves
from tests.kit import forked

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


def _everywhere() -> None:
    """Give no reason to skip a trial."""


def _draw_nothing(run: object, path: Path) -> None:
    files.write_bytes(path, b"a picture")


def not_linux() -> str | None:
    """Return the reason to skip a trial that needs Linux."""
    return None if sys.platform == "linux" else "it needs Linux"


@dataclass
class Trial:
    """One promise, and how it is tried: a decorator of the function that tries it.

    The first line of the function's docstring is the promise. The function tries the cases that its
    Tally wants, in an empty folder, and counts them: about `short` cases in `make test`, if any,
    and `full` in `make trials`. `skip` returns the reason if this machine can't try them. With
    `forks` the function is called in a new process, without threads. A run's curve is drawn only
    with `draws`: that takes longer than a run.
    """

    name: str
    short: int
    full: int
    skip: Callable[[], str | None] = _everywhere
    forks: bool = False
    draws: bool = False

    def __call__(self, run: Run) -> Run:
        """Register this trial, as `run` tries it."""
        self._run, self.promise = run, str(run.__doc__).splitlines()[0].rstrip(".")
        TRIALS[self.name] = self
        return run

    def try_in(
        self, folder: Path, *, short: bool = False, seed: int = SHORT_SEED, only: int | None = None
    ) -> Tally:
        """Try its short or full form, or one case of that alone, in the empty `folder`."""
        tally = Tally(self.name, seed, self.short if short else self.full, only)
        if not self.forks:
            self._try(tally, folder)
            return tally
        server = forked()
        results, sender = server.Pipe(duplex=False)
        arguments = (tally, folder, sender)
        server.Process(target=self._try_and_send, args=arguments, daemon=True).start()
        sender.close()  # then the end of the process ends `recv`
        tried: Tally = results.recv()
        return tried

    def _try(self, tally: Tally, folder: Path) -> None:
        draw = curves.draw_run if self.draws else _draw_nothing
        with mock.patch.object(curves, "draw_run", draw):
            self._run(tally, folder)

    def _try_and_send(self, tally: Tally, folder: Path, sender: Connection) -> None:
        if self.draws:
            import matplotlib.figure  # noqa: F401 - once for all children
        os.dup2(2, 1)  # stdout is for the table of results
        self._try(tally, folder)
        sender.send(tally)


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
