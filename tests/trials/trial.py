"""What every trial is made of: a number of cases to try, and what failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tally:
    """How many cases were tried, and one line on each that failed."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)

    def count(self, failure: str | None, what: str = "") -> None:
        """One more case, `what` was tried: None where it went as promised, or what went wrong."""
        self.cases += 1
        if failure is not None:
            self.failures.append(f"{what}: {failure}" if what else failure)


@dataclass(frozen=True)
class Trial:
    """One promise, and how it is tried.

    `run(cases, seed, folder)` tries about `cases` cases, drawn from `seed`, in the empty `folder`.
    `short` cases are part of `make test`, `full` ones of `make trials`.
    """

    name: str
    promise: str
    short: int
    full: int
    run: Callable[[int, int, Path], Tally]
    skip: Callable[[], str | None] = lambda: None
    """Why it can't be tried on this machine, or None."""
