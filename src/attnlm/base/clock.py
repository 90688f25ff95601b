"""When the work began that a budget of time is for."""

from __future__ import annotations

import time

command_began: float | None = None
"""By `time.perf_counter`, where this process is a command's; its imports count too."""


def began() -> float:
    """When this process began, if it is a command's; else now."""
    return time.perf_counter() if command_began is None else command_began
