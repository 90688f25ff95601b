"""`attnlm prepare` beside what others do with the same text: seconds, and peak memory.

Characters are measured against nanoGPT's script for them where the environment variable NANOGPT
names a checkout of it; gpt2 against one thread of tiktoken that does nothing but encode. Whole
processes take turns, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlm.corpus import get_corpus

_SCRIPT = Path("data/shakespeare_char/prepare.py")
_ENCODING = """
import sys, time
from pathlib import Path
import tiktoken
text = Path(sys.argv[1]).read_text(encoding="utf-8")
encoding = tiktoken.get_encoding("gpt2")
began = time.perf_counter()
encoding.encode_ordinary(text)
print(time.perf_counter() - began)
"""
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


class Row(NamedTuple):
    """One comparison, as text: above 1 in `ratio` is in our favour."""

    name: str
    ours: str
    rival: str
    ratio: str


class _Measured(NamedTuple):
    seconds: float
    mib: float
    stdout: str


def rows(megabytes: int = 100, turns: int = 3) -> list[Row]:
    """Measures `turns` times on about that much text, Tiny Shakespeare over and over."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "input.txt"
        shakespeare = "".join(get_corpus("tinyshakespeare", spool=folder).pieces())
        text.write_text(shakespeare * max(1, round(megabytes * 1e6 / len(shakespeare))))
        return [
            *(_char_rows(text, Path(os.environ["NANOGPT"]), turns) if _has_nanogpt() else []),
            *_gpt2_rows(text, turns),
            *_start_rows(folder, shakespeare, turns),
        ]


def _has_nanogpt() -> bool:
    return (Path(os.environ.get("NANOGPT", "")) / _SCRIPT).is_file() and "NANOGPT" in os.environ


def _char_rows(text: Path, nanogpt: Path, turns: int) -> list[Row]:
    shutil.copy(nanogpt / _SCRIPT, text.parent)  # it reads input.txt beside itself
    ours, theirs = _taking_turns(
        _preparing(text, "char"), [sys.executable, str(text.parent / _SCRIPT.name)], turns
    )
    return [
        _seconds_row("prepare, char: nanoGPT's script", _seconds(ours), _seconds(theirs)),
        _memory_row("prepare, char: nanoGPT's script", ours, theirs),
    ]


def _gpt2_rows(text: Path, turns: int) -> list[Row]:
    ours, theirs = _taking_turns(
        _preparing(text, "gpt2"), [sys.executable, "-c", _ENCODING, str(text)], turns
    )
    encoding = statistics.median(float(run.stdout) for run in theirs)
    return [
        _seconds_row("prepare, gpt2: one tiktoken thread", _seconds(ours), encoding),
        _memory_row("prepare, gpt2: one tiktoken thread", ours, theirs),
    ]


def _start_rows(folder: Path, shakespeare: str, turns: int) -> list[Row]:
    small = folder / "small.txt"
    small.write_text(shakespeare)
    ours, python = _taking_turns(_preparing(small, "char"), [sys.executable, "-c", ""], turns)
    helped, _ = _taking_turns([sys.executable, "-m", "attnlm", "--help"], ["true"], turns)
    return [
        _seconds_row("prepare, 1.1 MB: python -c ''", _seconds(ours), _seconds(python)),
        _seconds_row("--help: python -c ''", _seconds(helped), _seconds(python)),
    ]


def _preparing(text: Path, tokenizer: str) -> list[str]:
    return [
        *(sys.executable, "-m", "attnlm", "prepare", str(text), "--tokenizer", tokenizer),
        *("--data-dir", str(text.parent / "data"), "--force"),
    ]


def _taking_turns(
    ours: Sequence[str], theirs: Sequence[str], turns: int
) -> tuple[list[_Measured], list[_Measured]]:
    runs = [(_measured(ours), _measured(theirs)) for _ in range(turns)]
    return [run[0] for run in runs], [run[1] for run in runs]


def _measured(command: Sequence[str]) -> _Measured:
    measuring = [sys.executable, "-c", _MEASURING, *command]
    done = subprocess.run(measuring, check=True, stdout=subprocess.PIPE, text=True)
    first, _, stdout = done.stdout.partition("\n")
    seconds, peak = first.split()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return _Measured(float(seconds), int(peak) * unit / 2**20, stdout)


def _seconds(runs: Sequence[_Measured]) -> float:
    return statistics.median(run.seconds for run in runs)


def _seconds_row(name: str, ours: float, theirs: float) -> Row:
    return Row(name, f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.2f}")


def _memory_row(name: str, ours: Sequence[_Measured], theirs: Sequence[_Measured]) -> Row:
    our_peak, their_peak = (max(run.mib for run in runs) for runs in (ours, theirs))
    return Row(name, f"{our_peak:.0f} MiB", f"{their_peak:.0f} MiB", f"{their_peak / our_peak:.2f}")


def main() -> None:
    """Prints the rows."""
    for row in rows():
        print(f"{row.name:<40}{row.ours:>12}{row.rival:>12}{row.ratio:>8}")  # noqa: T201


if __name__ == "__main__":
    main()
