"""SIGINT, SIGTERM and SIGHUP: raised at once, or noted while a training run has steps to save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SAME = 0.5
"""Seconds within which signals count as one: `timeout` passes on what the terminal sent too."""

Handler = Callable[[int, FrameType | None], object]

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""What a closed terminal sends, several times over; Windows has none."""


def signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop us. A hangup that is ignored, as under `nohup`, stays so."""
    both = (signal.SIGINT, signal.SIGTERM)
    if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN:
        return both
    return (*both, HANGUP)


class Interrupted(KeyboardInterrupt):
    """Somebody asked us to stop; `signum` says how."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def leave(signum: int, frame: FrameType | None = None) -> None:
    """End the process at once: whatever is on disk is complete at any moment."""
    os._exit(128 + signum)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)


at_first_signal: Handler = _interrupt
at_second_signal: Handler = signal.default_int_handler
"""What signals to a training run call, if the first is not only noted. Both raise KeyboardInterrupt
or end the process, as the command line's do. After the second, nothing is saved."""


class StopSignal:
    """The signal that asks a training run to stop.

    While it `raises`, it raises Interrupted at once: before the first step, which may compile for
    minutes, there is nothing to save. Later it is noted, and the run calls `check` where nothing is
    half done. With several processes, `check` raises in all of them, after they `agree`.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.signum: int | None = None
        self._since = 0.0
        self.raises, self._is_agreed = True, alone

    @property
    def has_come(self) -> bool:
        """Return True if this process was asked to stop."""
        return self.signum is not None

    def agree(self) -> None:
        """Note that all processes know that one of them was asked to stop."""
        self.signum, self._is_agreed = self.signum or signal.SIGTERM, True

    def check(self) -> None:
        """Raise Interrupted if a signal has come and all processes know it."""
        if self.signum is not None and self._is_agreed:
            raise Interrupted(self.signum)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals meanwhile. Raise Interrupted for one that came too late for `check`."""
        with _handling(self._handle):
            yield
        if self.signum is not None:
            raise Interrupted(self.signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # A closed terminal sends several hangups, and a session that ends SIGTERM and SIGHUP.
        is_second = self.signum is not None and HANGUP not in (signum, self.signum)
        if is_second and time.monotonic() - self._since > _SAME:
            at_second_signal(signum, frame)
        if self.signum is None:
            self._since = time.monotonic()
        self.signum = signum if self.signum in (None, HANGUP) else self.signum
        if self.raises:
            at_first_signal(signum, frame)


@contextlib.contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Call `handler` for signals meanwhile; in a thread other than the main one it can't be."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, handler) for signum in signals()}
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)
