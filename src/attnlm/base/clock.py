"""The time at which work with a time budget began."""

from __future__ import annotations

import time

command_began: float | None = None
"""The start of this process's command, before its imports, by `time.perf_counter`; else None."""


def began() -> float:
    """Return when this process began if it runs a command, else the current time."""
    return time.perf_counter() if command_began is None else command_began
