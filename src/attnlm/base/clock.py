"""The time from which a time budget counts."""

from __future__ import annotations

import time

command_began: float | None = None
"""The `time.perf_counter` before the command's imports; None if this process runs no command, or
once a budget has begun with the command."""


def budget_start() -> float:
    """Return when a budget began: with the command, for its first budget; now for all others."""
    global command_began
    began, command_began = command_began, None
    return time.perf_counter() if began is None else began
