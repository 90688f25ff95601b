"""Time that does not depend on how busy the machine is."""

from __future__ import annotations

import time

import pytest


class Clock:
    """Replacement for `time.perf_counter` that advances by `tick` seconds with each call.

    A budget has room for the same work on every machine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick
        monkeypatch.setattr(time, "perf_counter", self._read)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds

    def _read(self) -> float:
        self.now += self.tick
        return self.now
