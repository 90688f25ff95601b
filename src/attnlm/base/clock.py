"""The time from which a time budget counts."""

from __future__ import annotations

import time

command_began: float | None = None
"""The `time.perf_counter` before the command's imports; None if this process runs no command."""


def began() -> float:
    """Return `command_began` if this process runs a command, else `time.perf_counter()`."""
    return time.perf_counter() if command_began is None else command_began
