"""`python -m benchmarks.measured_training …`: `attnlm train …`, whose memory is measured.

Started by itself or by torchrun. Prints one JSON object: the bytes at the peak, in addition to
PyTorch, of rank 0, and the tokens per second since the evaluation before the last.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401  # before memory is measured


def main() -> None:
    """Trains, and prints what it took."""
    before = _memory("VmRSS")
    from attnlm.cli.app import run_command
    from attnlm.compute.processes import is_main

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["attnlm", "train", *sys.argv[1:], "--checkpoint-dir", folder, "--json"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            run_command()
    if is_main():
        speed = json.loads(said.getvalue())["tokens_per_second"]
        print(json.dumps({"bytes": _memory("VmHWM") - before, "tokens_per_second": speed}))


def _memory(key: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    main()
