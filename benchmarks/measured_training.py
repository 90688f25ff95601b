"""`python -m benchmarks.measured_training DATASET SETTINGS`: a training whose memory is measured.

Started by itself or by torchrun. SETTINGS is a JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401  # before memory is measured


def main() -> None:
    """Trains; prints the bytes at the peak, in addition to PyTorch, and the tokens per second."""
    before = _memory("VmRSS")
    import attnlm
    from attnlm.compute.processes import is_main

    dataset, settings = sys.argv[1], json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        run = attnlm.train(dataset, checkpoint_dir=folder, device="cpu", seed=1, **settings)
        if is_main():
            speed = run.metrics()[-1]["tokens_per_second"]
            measured = {"bytes": _memory("VmHWM") - before, "tokens_per_second": speed}
            print(json.dumps(measured))


def _memory(key: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    main()
