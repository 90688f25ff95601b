"""Ctrl-C, SIGTERM, SIGHUP: at once where nothing is half done, else as soon as it is done."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

at_second_signal: Callable[[int, FrameType | None], None] | None = None
"""What a second signal does, rather than raise: the command line ends its process there and then.

An exception takes its time where a compiler waits for its children.
"""

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""What a closed terminal sends, several times over; Windows has none."""

_SOON, _LATER = 0.02, 1.0  # seconds


def signals() -> tuple[signal.Signals, ...]:
    """Those that stop us. A hangup that is ignored, as `nohup` has it, stays so."""
    both = (signal.SIGINT, signal.SIGTERM)
    if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN:
        return both
    return (*both, HANGUP)


class Interrupted(KeyboardInterrupt):
    """Somebody asked us to stop; `signum` says how.

    `at_once`: they asked twice. What is in memory may be half changed then, and is not for saving.
    """

    def __init__(self, signum: int, *, at_once: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum, self.at_once = signum, at_once


@contextlib.contextmanager
def when_lost(act: Callable[[int], object]) -> Iterator[None]:
    """Calls `act` with the signal of an Interrupted that Python dropped, and says nothing of it.

    It drops what is raised in callbacks of weak references and in `__del__`, which run at any
    moment: imports and PyTorch's compiler are full of them.
    """
    before = sys.unraisablehook

    def hook(dropped: UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, Interrupted):
            act(dropped.exc_value.signum)
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def held() -> Iterator[list[int]]:
    """Yields the signals that come while it lasts; they are answered when it is over.

    Also second ones, so it is for what ends soon after a signal. In a thread other than the main
    one there are none.
    """
    came: list[int] = []
    with contextlib.ExitStack() as afterwards:
        if threading.current_thread() is threading.main_thread():
            afterwards.callback(_raise_all, came)
            for signum in signals():
                before = signal.signal(signum, lambda number, _: came.append(number))
                afterwards.callback(signal.signal, signum, before)
        yield came


def _raise_all(signums: list[int]) -> None:
    with contextlib.ExitStack() as each:  # whatever the first ones raise
        for signum in reversed(signums):
            each.callback(signal.raise_signal, signum)


class Interruption:
    """Raises Interrupted when a signal arrives, but never inside `shield`.

    A second signal is not held back any more: whoever sends it wants to stop at once, and files
    are replaced whole or not at all. Hangups do not count: a shell and the system each send some,
    and a session that ends sends SIGTERM and SIGHUP together.

    `deferred`: a first signal is only noted, as `pending`, until all processes that train together
    `agree` to stop.
    """

    def __init__(self, *, deferred: bool = False) -> None:
        self.pending: int | None = None
        """The signal that has come and is not answered yet."""
        self._deferred = self._shielded = deferred
        self._agreed = self._is_others = False
        self.answered = False
        """Whether the exception has arrived: until then it may be lost on its way, and is raised
        again."""

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Takes over the signals while it lasts; in a thread other than the main one it can't."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._handle) for signum in signals()}
        try:
            with when_lost(lambda signum: self._send_again(signum, _SOON)):
                yield
        finally:
            self.answered = True
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """What is done inside is done whole."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = self._deferred
        if self.pending is not None and not self._deferred:
            raise Interrupted(self.pending)

    def agree(self, signum: int) -> None:
        """All processes stop by this signal, which has come to one of them at least."""
        self._agreed, self._is_others = True, self.pending is None
        self.pending = signum

    def raise_agreed(self) -> None:
        """Raises Interrupted where processes have agreed to stop."""
        if self._agreed:
            assert self.pending is not None
            raise Interrupted(self.pending)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again = self.pending is not None and not self._is_others
        self._is_others = False
        if again and HANGUP in (signum, self.pending):
            self.pending = signum if self.pending == HANGUP else self.pending
            return
        self.pending = signum
        if again and at_second_signal is not None:
            at_second_signal(signum, frame)
        if not again and not self._shielded:
            self._send_again(signum, _LATER)  # if some `except:` keeps it for itself
        if again or not self._shielded:
            raise Interrupted(signum, at_once=again)

    def _send_again(self, signum: int, seconds: float) -> None:
        """Not at once, or it would arrive, and be lost, in the same place."""

        def send() -> None:
            if not self.answered:
                self.pending = None
                signal.raise_signal(signum)

        later(seconds, send)


def later(seconds: float, act: Callable[[], None]) -> None:
    """Calls `act` in a thread that nobody waits for."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
