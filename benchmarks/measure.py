"""Measure two programs in turns, and make a row of the table from the figures of both.

Each side is a command. Its figures are its seconds from start to exit, its peak memory, and the
numbers of the JSON object that it prints last, such as its tokens per second. Both sides run once
before they count, and then alternate; a cell is the median of a side, and the ratio the median of
the rounds' ratios, so that other load on the machine affects both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SEED = "SEED"
"""A word of a command that stands for the number of the round."""

# A child's peak begins with its parent's size at the fork, so a small process measures them.
_MEASURING = """
import json, resource, subprocess, sys, tempfile, time
with tempfile.TemporaryDirectory() as folder:
    began = time.perf_counter()
    done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True, cwd=folder)
    seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
print(json.dumps({"process_seconds": seconds, "mib": peak * unit / 2**20}))
print(done.stdout)
sys.exit(done.returncode)
"""
_ROOT = Path(__file__).parent.parent
_CHANGE_FOLDER = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class Bench:
    """What all parts share: the text, its characters as a data set, a folder, and the options."""

    text: Path
    dataset: Path
    folder: Path
    nanogpt: Path | None
    rounds: int
    seconds: float
    """the length of a measurement of tokens per second, roughly"""
    trainings: Sequence[str] = ()
    """the models or recipes whose losses are measured, each with its options"""


class Row(NamedTuple):
    """One comparison, as text: a ratio above 1 is in our favour."""

    name: str
    ours: str
    rival: str = ""
    ratio: str = ""


class Figure(NamedTuple):
    """How a figure is shown, and whether more of it is better."""

    form: str
    more_is_better: bool = False


FIGURES = {
    "tokens_per_second": Figure("{:,.0f} tokens/s", more_is_better=True),
    "us_per_token": Figure("{:,.1f} µs/token"),
    "process_seconds": Figure("{:.2f} s"),
    "mib": Figure("{:,.0f} MiB"),
    "slowdown": Figure("{:.1f} times as long"),
    "val_loss": Figure("{:.4f}"),
}


def attnlm(*words: object) -> list[str]:
    """Return the command line of `attnlm` in this environment."""
    return python("attnlm", *words)


def python(module: str, *words: object) -> list[str]:
    """Return the command line of a module in this environment."""
    return [sys.executable, "-m", module, *map(str, words)]


def within(folder: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs in another folder."""
    return [sys.executable, "-c", _CHANGE_FOLDER, str(folder), *command]


def measure(command: Sequence[str], round_number: int = 0) -> dict[str, Any]:
    """Run a command in an empty folder; return what it printed as JSON, and its figures.

    If the command fails, the benchmark ends with the end of what it wrote on stderr.
    """
    words = [str(round_number) if word == SEED else word for word in command]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURING, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{done.stderr[-2000:]}")
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: value for line in objects for name, value in json.loads(line).items()}


def in_turns(commands: Sequence[Sequence[str]], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Run commands once, and then in each round one after another; yield what each round gave."""
    for command in commands:
        measure(command)
    for number in range(1, rounds + 1):
        yield [measure(command, number) for command in commands]


def compare(
    name: str,
    figures: Sequence[str],
    ours: Sequence[str],
    rival: Sequence[str] | str,
    rounds: int,
) -> list[Row]:
    """Measure two commands in the same rounds; return a row for each of the figures.

    `rival` may be the reason why there is none. Then only our side is measured.
    """
    is_missing = isinstance(rival, str)
    made = list(in_turns([ours] if is_missing else [ours, rival], rounds))
    return [
        row(
            name,
            figure,
            [sides[0] for sides in made],
            rival if isinstance(rival, str) else [sides[1] for sides in made],
        )
        for figure in figures
    ]


def row(
    name: str,
    figure: str,
    ours: Sequence[dict[str, Any]],
    theirs: Sequence[dict[str, Any]] | str,
) -> Row:
    """Return the row of a figure, from what both sides gave in each round."""
    form, more_is_better = FIGURES[figure]

    def cell(side: Sequence[dict[str, Any]]) -> str:
        shown = _median_and_range([one[figure] for one in side], form.format)
        losses = [one["val_loss"] for one in side if "val_loss" in one]
        if figure != "process_seconds" or not losses:
            return shown
        return f"{shown}, to a loss of {_median_and_range(losses, '{:.3f}'.format)}"

    if isinstance(theirs, str):
        return Row(name, cell(ours), theirs, "–" if theirs else "")
    pairs = [(our[figure], their[figure]) for our, their in zip(ours, theirs, strict=True)]
    ratios = [our / their if more_is_better else their / our for our, their in pairs]
    return Row(name, cell(ours), cell(theirs), _median_and_range(ratios, "{:.2f}".format))


def _median_and_range(values: Sequence[float], form: Callable[[float], str]) -> str:
    median = form(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({form(min(values)).split()[0]}–{form(max(values)).split()[0]})"
