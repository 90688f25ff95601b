"""Ways in which SIGTERM comes while a command is busy; the first argument names one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import NoReturn

from attnlm.base import process as signals
from attnlm.cli import exits


def kept() -> None:
    """Somebody keeps the exception."""
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(100)


def twice() -> None:
    """The exception is delayed, as by a compiler that waits for its children."""
    stop = signals.StopSignal()
    stop.defer()
    with stop.listening():
        try:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(100)


def afterwards() -> None:
    """A second signal comes when the work is almost done."""
    end = os._exit

    def end_after_a_signal(status: int) -> NoReturn:
        signal.raise_signal(signal.SIGTERM)
        end(status)

    os._exit = end_after_a_signal
    raise signals.Interrupted(signal.SIGTERM)


signals._PATIENCE = 0.5
exits.run_and_exit({"kept": kept, "twice": twice, "afterwards": afterwards}[sys.argv[1]])
