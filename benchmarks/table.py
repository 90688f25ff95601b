"""Rows of a measurement, and helpers that run two programs alternately."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

# A child's peak begins with its parent's size at the fork, so a small process measures them.
_MEASURING = """
import resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
seconds = time.perf_counter() - began
print(seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(done.stdout if done.returncode == 0 else "", end="")
sys.exit(done.returncode)
"""


class Measured(NamedTuple):
    """Result of a process: seconds, peak memory in MiB, and what it printed."""

    seconds: float
    mib: float
    stdout: str


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
    """Return the time of a process from start to exit; its output is dropped."""
    began = time.perf_counter()
    subprocess.run(  # type: ignore[call-overload]
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )
    return time.perf_counter() - began


def measured(command: Sequence[str]) -> Measured:
    """Run a process and measure it; raise CalledProcessError if it fails."""
    measuring = [sys.executable, "-c", _MEASURING, *command]
    done = subprocess.run(measuring, check=True, stdout=subprocess.PIPE, text=True)
    first, _, stdout = done.stdout.partition("\n")
    seconds, peak = first.split()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return Measured(float(seconds), int(peak) * unit / 2**20, stdout)


def attnlm(*arguments: str) -> list[str]:
    """The command line of `attnlm` in this environment."""
    return [sys.executable, "-m", "attnlm", *arguments]
