"""Ctrl-C and SIGTERM: at once where nothing is half done, else as soon as it is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Somebody asked us to stop; `signum` says how.

    `at_once`: they asked twice. What is in memory may be half changed then, and is not for saving.
    """

    def __init__(self, signum: int, *, at_once: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum, self.at_once = signum, at_once


class Interruption:
    """Raises Interrupted when a signal arrives, but never inside `shield`.

    A second signal is not held back any more: whoever sends it wants to stop at once, and files
    are replaced whole or not at all.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._shielded = False

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Takes over the signals while it lasts; in a thread other than the main one it can't."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """What is done inside is done whole."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again = self._pending is not None
        self._pending = signum
        if again or not self._shielded:
            raise Interrupted(signum, at_once=again)
