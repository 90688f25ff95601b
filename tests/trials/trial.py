"""What every trial is made of: numbered cases, each drawn by itself, and what failed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

_Item = TypeVar("_Item")

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
    """Of the case that is being tried."""

    def chosen(
        self, items: Sequence[_Item], wanted: int, first: int = 0
    ) -> Iterator[tuple[_Item, Random]]:
        """Each item with its generator, or a sample of `wanted`: cases numbered from `first` on."""
        numbers = range(len(items))
        if self.only is None and wanted < len(items):
            generator = Random(f"{self.seed} {self.trial} from {first}")
            yield from self._each(items, sorted(generator.sample(numbers, wanted)), first)
        else:
            yield from self._each(items, numbers, first)

    def drawn(self, wanted: int, first: int = 0) -> Iterator[tuple[int, Random]]:
        """0, 1, … with their generators: cases numbered from `first` on."""
        most = wanted if self.only is None else self.only + 1
        yield from self._each(range(most), range(most), first)

    def _each(
        self, items: Sequence[_Item], numbers: Sequence[int], first: int
    ) -> Iterator[tuple[_Item, Random]]:
        for number in numbers:
            self.number = first + number
            if self.only in (None, self.number):
                yield items[number], Random(f"{self.seed} {self.trial} {self.number}")

    def count(self, failure: str | None, what: str) -> None:
        """One more case, `what` was tried: None where it went as promised, or what went wrong."""
        self.cases += 1
        if failure is not None:
            self.failures.append(f"case {self.number}: {what}: {failure}")


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


@dataclass(frozen=True)
class Trial:
    """One promise, and how it is tried.

    `run(tally, folder)` tries the cases that `tally` wants, in the empty `folder`, and counts them.
    `short` cases, if any, are part of `make test`, `full` ones of `make trials`.
    """

    name: str
    promise: str
    short: int
    full: int
    run: Callable[[Tally, Path], None]
    skip: Callable[[], str | None] = lambda: None
    """Why it can't be tried on this machine, or None."""

    def try_in(
        self, folder: Path, *, short: bool = False, seed: int = SHORT_SEED, only: int | None = None
    ) -> Tally:
        """Tries its short or full form, or one case of that alone, in the empty `folder`."""
        tally = Tally(self.name, seed, self.short if short else self.full, only)
        self.run(tally, folder)
        return tally
