"""`attnlm prepare` and `--help` as whole processes: seconds, and peak memory.

Characters are compared with nanoGPT's script; GPT-2's byte pairs with one thread of tiktoken that
only encodes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Bench, Row, attnlm, compare

BOTH = ("process_seconds", "mib")
_BYTES = 100_000_000
# Only the encoding counts: this replaces the seconds of the process.
_ENCODING = """
import json, sys, time
from pathlib import Path
import tiktoken
text = Path(sys.argv[1]).read_text(encoding="utf-8")
encoding = tiktoken.get_encoding("gpt2")
began = time.perf_counter()
encoding.encode_ordinary(text)
print(json.dumps({"process_seconds": time.perf_counter() - began}))
"""


def prepare(bench: Bench) -> Iterator[Row]:
    """100 MB of the text, which is repeated, and the start of a command."""
    long = bench.folder / "input.txt"
    short = bench.text.read_bytes()
    long.write_bytes(short * max(1, round(_BYTES / len(short))))
    rival: list[str] | str = "NANOGPT is not set"
    if bench.nanogpt is not None:  # its script reads input.txt from its own folder
        script = bench.nanogpt / "data" / "shakespeare_char" / "prepare.py"
        rival = [sys.executable, str(shutil.copy(script, bench.folder))]
    ours = _preparing(bench, long, "char")
    yield from compare("prepare, char: nanoGPT's script", BOTH, ours, rival, bench.rounds)
    if "TIKTOKEN_CACHE_DIR" in os.environ:
        ours = _preparing(bench, long, "gpt2")
        encoding = [sys.executable, "-c", _ENCODING, str(long)]
        yield from compare("prepare, gpt2: one tiktoken thread", BOTH, ours, encoding, bench.rounds)
    else:
        yield Row("prepare, gpt2", "", "TIKTOKEN_CACHE_DIR is not set", "–")
    start = [sys.executable, "-c", ""]
    name = "--help: python -c ''"
    yield from compare(name, BOTH[:1], attnlm("--help"), start, bench.rounds)


def _preparing(bench: Bench, text: Path, tokenizer: str) -> list[str]:
    folder = bench.folder / "prepared"
    options = ("--tokenizer", tokenizer, "--data-dir", folder, "--force")
    return attnlm("prepare", text, *options)
