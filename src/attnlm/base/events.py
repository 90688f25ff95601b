"""What the library tells whoever called it, as it goes: it never prints, it reports events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One line that a person should read: a choice that was made, something left out."""

    text: str


@dataclass(frozen=True)
class Progress:
    """How far a long task is: `done` of `total` (None where it can't be known) in `unit`s."""

    task: str
    done: int
    total: int | None
    unit: str


OnEvent = Callable[[object], None]


def ignore(event: object) -> None:
    """A listener that ignores all events."""
