"""Time that does not depend on how busy the machine is."""

from __future__ import annotations

import time

import pytest


class Clock:
    """`time.perf_counter` for a test: it goes on by `tick` seconds each time it is asked.

    What a budget has room for is then the same on every machine, however busy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick
        monkeypatch.setattr(time, "perf_counter", self._read)

    def advance(self, seconds: float) -> None:
        """Lets so much time pass."""
        self.now += seconds

    def _read(self) -> float:
        self.now += self.tick
        return self.now
