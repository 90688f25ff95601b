"""Events that the library reports to its caller while it works. The library never prints.

`str` of an event is a line to print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One line that the user should read, such as a choice that was made or something left out."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Progress:
    """The progress of a long task: `done` of `total` `unit`s. None stands for an unknown total."""

    task: str
    done: int
    total: int | None
    unit: str

    def __str__(self) -> str:
        """Return `encode: 400 of 4,000 chars (10%)`; if `total` is None, `encode: 400 chars`."""
        if not self.total:
            return f"{self.task}: {self.done:,} {self.unit}"
        share = self.done / self.total
        return f"{self.task}: {self.done:,} of {self.total:,} {self.unit} ({share:.0%})"


OnEvent = Callable[[object], None]


def ignore(event: object) -> None:
    """Ignore the event: a listener for callers that need no events."""
