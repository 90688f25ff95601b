"""What every measurement returns, and how two programs take turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One comparison, as text: above 1 in `ratio` is in our favour."""

    name: str
    ours: str
    rival: str
    ratio: str


def in_turn(
    ours: Callable[[], float], rival: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Medians of what both return, and of their quotients ours / rival, over alternating runs."""
    pairs = [(ours(), rival()) for _ in range(rounds)]
    quotients = [one / other for one, other in pairs]
    return (
        statistics.median(one for one, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(quotients),
    )


def seconds_of(command: Sequence[str], **options: object) -> float:
    """How long a process takes, from its start to its end; its output is dropped."""
    began = time.perf_counter()
    subprocess.run(  # type: ignore[call-overload]
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )
    return time.perf_counter() - began


def attnlm(*arguments: str) -> list[str]:
    """The command line of `attnlm` in this environment."""
    return [sys.executable, "-m", "attnlm", *arguments]
