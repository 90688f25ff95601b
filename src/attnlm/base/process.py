"""This process: when its command began, and the signals that end it.

SIGINT, SIGTERM and SIGHUP are raised immediately, or noted while a run has steps to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_PATIENCE = 2.0  # seconds from a signal to the end of the process

ends_process = False
"""True on the command line, where a signal ends the process within `_PATIENCE` seconds, and a
second signal immediately. Nothing is saved after the second signal."""
came: int | None = None
"""The signal that ends the process, once it was raised."""

command_began: float | None = None
"""The `time.perf_counter` before the command's imports; None if this process runs no command, or
once a budget has begun with the command."""

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""The signal that a closed terminal sends several times; None on Windows."""


def budget_start() -> float:
    """Return when a budget began: with the command, for its first budget; now for all others."""
    global command_began
    began, command_began = command_began, None
    return time.perf_counter() if began is None else began


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process, without SIGHUP if it is ignored (`nohup`)."""
    both = (signal.SIGINT, signal.SIGTERM)
    if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN:
        return both
    return (*both, HANGUP)


class Interrupted(KeyboardInterrupt):
    """A request to stop this process, made by the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def exit_now(signum: int, frame: FrameType | None = None) -> None:
    """End the process immediately. This is safe: files on disk are complete at any moment."""
    os._exit(128 + signum)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise Interrupted and, on the command line, make sure that the process ends."""
    global came
    if ends_process:
        came = signum
        for other in stop_signals():
            # A closed terminal sends several hangups.
            signal.signal(other, signal.SIG_IGN if other == HANGUP else exit_now)
        # Some code swallows every exception, as PyTorch's import does.
        timer = threading.Timer(_PATIENCE, exit_now, [signum])
        timer.daemon = True
        timer.start()
    raise Interrupted(signum)


class StopSignal:
    """The signal that asks a training run to stop.

    A signal raises Interrupted immediately: before the first step, which may compile for minutes,
    nothing needs saving. After a call of `defer`, a signal is only noted. When no work is half
    done, the run calls `check`, which raises Interrupted if a signal has come.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.signum: int | None = None
        self._is_deferred = False
        self._is_agreed = alone

    @property
    def has_come(self) -> bool:
        """Return True if this process knows of a signal to stop."""
        return self.signum is not None

    def defer(self) -> None:
        """Note signals from now on, instead of raising Interrupted immediately."""
        self._is_deferred = True

    def agree_to_stop(self) -> None:
        """Make `check` raise Interrupted from now on, even if this process has received no signal.

        All processes of a run call this together, once each knows that one has received a signal.
        """
        self.signum = self.signum or signal.SIGTERM
        self._is_agreed = True

    def check(self) -> None:
        """Raise Interrupted if a signal came; with several processes, after `agree_to_stop`."""
        if self.signum is not None and self._is_agreed:
            raise Interrupted(self.signum)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals in this context. At its end, raise Interrupted if a signal has come.

        Outside the main thread, which alone receives signals, do nothing.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {signum: signal.signal(signum, self._handle) for signum in stop_signals()}
        try:
            yield
        finally:
            for signum, previous in before.items():
                signal.signal(signum, previous)
        if self.signum is not None:
            raise Interrupted(self.signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # A closed terminal sends several hangups; an ending session sends SIGTERM and SIGHUP.
        if self.signum is not None and HANGUP not in (signum, self.signum):
            if ends_process:
                exit_now(signum)
            raise KeyboardInterrupt
        self.signum = signum if self.signum in (None, HANGUP) else self.signum
        if not self._is_deferred:
            interrupt(signum, frame)
