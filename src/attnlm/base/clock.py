"""The time at which work with a time budget began."""

from __future__ import annotations

import time

command_began: float | None = None
"""The `time.perf_counter` at the start of this process's command, before imports, or None."""


def began() -> float:
    """Return when this process began if it runs a command, else the current time."""
    return time.perf_counter() if command_began is None else command_began
