"""What the library tells whoever called it, as it goes: it never prints, it reports events.

`str` of an event is a line to print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One line that a person should read: a choice that was made, something left out."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Progress:
    """How far a long task is: `done` of `total` (None where it can't be known) in `unit`s."""

    task: str
    done: int
    total: int | None
    unit: str

    def __str__(self) -> str:
        """`encode: 1,000 of 4,000 chars (25%)`, without the whole where it is not known."""
        if not self.total:
            return f"{self.task}: {self.done:,} {self.unit}"
        share = self.done / self.total
        return f"{self.task}: {self.done:,} of {self.total:,} {self.unit} ({share:.0%})"


OnEvent = Callable[[object], None]


def ignore(event: object) -> None:
    """A listener that ignores all events."""
