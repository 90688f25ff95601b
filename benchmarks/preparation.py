"""Compare `attnlm prepare` with other programs on the same text: seconds and peak memory.

Characters are compared with nanoGPT's script if the environment variable NANOGPT names a checkout;
gpt2 with one thread of tiktoken that only encodes, also on the Python files of this environment,
whose words vary more. Whole processes alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnlm.data.dataset import Dataset
from benchmarks.table import Measured, Row, attnlm, measured

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
_BYTES, _TURNS = 100e6, 3


def prepare(dataset: Dataset, text: Path) -> list[Row]:
    """100 MB of text, the given one over and over, and the start of a command."""
    with tempfile.TemporaryDirectory() as name:
        long = Path(name) / "input.txt"
        short = text.read_bytes()
        long.write_bytes(short * max(1, round(_BYTES / len(short))))
        sources = Path(name) / "sources.txt"
        sources.write_bytes(_python_sources())
        return [
            *(_char_rows(long, Path(os.environ["NANOGPT"])) if "NANOGPT" in os.environ else []),
            *(
                [*_gpt2_rows(long, "gpt2"), *_gpt2_rows(sources, "gpt2, Python")]
                if "TIKTOKEN_CACHE_DIR" in os.environ
                else []
            ),
            *_start_rows(Path(name), short),
        ]


def _char_rows(text: Path, nanogpt: Path) -> list[Row]:
    shutil.copy(nanogpt / _SCRIPT, text.parent)  # it reads input.txt from its own folder
    ours, theirs = _taking_turns(
        _preparing(text, "char"), [sys.executable, str(text.parent / _SCRIPT.name)]
    )
    return [
        _seconds_row("prepare, char: nanoGPT's script", _seconds(ours), _seconds(theirs)),
        _memory_row("prepare, char: nanoGPT's script", ours, theirs),
    ]


def _python_sources() -> bytes:
    """Return Python files of the environment, about as long in UTF-8 as the other text."""
    taken, size = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        if size < _BYTES:
            taken.append(path.read_text(encoding="utf-8", errors="replace").encode())
            size += len(taken[-1])
    return b"".join(taken)


def _gpt2_rows(text: Path, what: str) -> list[Row]:
    ours, theirs = _taking_turns(
        _preparing(text, "gpt2"), [sys.executable, "-c", _ENCODING, str(text)]
    )
    encoding = statistics.median(float(run.stdout) for run in theirs)
    return [
        _seconds_row(f"prepare, {what}: one tiktoken thread", _seconds(ours), encoding),
        _memory_row(f"prepare, {what}: one tiktoken thread", ours, theirs),
    ]


def _start_rows(folder: Path, shakespeare: bytes) -> list[Row]:
    small = folder / "small.txt"
    small.write_bytes(shakespeare)
    ours, python = _taking_turns(_preparing(small, "char"), [sys.executable, "-c", ""])
    helped, _ = _taking_turns(attnlm("--help"), ["true"])
    return [
        _seconds_row("prepare, 1.1 MB: python -c ''", _seconds(ours), _seconds(python)),
        _seconds_row("--help: python -c ''", _seconds(helped), _seconds(python)),
    ]


def _preparing(text: Path, tokenizer: str) -> list[str]:
    return [
        *attnlm("prepare", str(text), "--tokenizer", tokenizer),
        *("--data-dir", str(text.parent / "data"), "--force"),
    ]


def _taking_turns(
    ours: Sequence[str], theirs: Sequence[str]
) -> tuple[list[Measured], list[Measured]]:
    runs = [(measured(ours), measured(theirs)) for _ in range(_TURNS)]
    return [run[0] for run in runs], [run[1] for run in runs]


def _seconds(runs: Sequence[Measured]) -> float:
    return statistics.median(run.seconds for run in runs)


def _seconds_row(name: str, ours: float, theirs: float) -> Row:
    return Row(name, f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.2f}")


def _memory_row(name: str, ours: Sequence[Measured], theirs: Sequence[Measured]) -> Row:
    our_peak, their_peak = (max(run.mib for run in runs) for runs in (ours, theirs))
    return Row(name, f"{our_peak:.0f} MiB", f"{their_peak:.0f} MiB", f"{their_peak / our_peak:.2f}")
