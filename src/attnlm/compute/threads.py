"""How many threads make a training step fastest: tried once a configuration, remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from attnlm.base.caches import cache_folder
from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_json, write_json
from attnlm.compute.subnormals import flushing_subnormals

# Floating-point operations of a step from which every thread is of use.
_LARGE_STEP = 4e9
# A second thread that saves less than this share of the time isn't worth what it costs on a busy
# machine, where each product waits for the slowest.
_WORTH = 0.1
_ROUNDS, _SECONDS = 3, 0.04
_MOST_REMEMBERED = 256
# What is remembered was tried in this way; a change of it makes all trials anew.
_WAY = "batches shared out"


@contextlib.contextmanager
def keeping_threads() -> Iterator[None]:
    """Flush subnormal numbers meanwhile. Afterwards restore this mode, PyTorch's number of threads
    and the precision of its products."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        with flushing_subnormals():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def choose_threads(
    work: float, about: object, step_with: Callable[[int], Callable[[], object]]
) -> int:
    """One thread or all that PyTorch has, whichever makes steps faster: `step_with(threads)()`.

    `work` is about how many floating-point operations a step takes; `about` (JSON values) is what
    the choice depends on, and what it is remembered by: the same run takes the same number again.
    """
    everything = torch.get_num_threads()
    if everything == 1 or work >= _LARGE_STEP:
        return everything
    described = json.dumps([_WAY, about, everything, os.cpu_count(), torch.__version__])
    key = hashlib.sha256(described.encode()).hexdigest()[:32]
    folder = cache_folder()
    path = folder / "threads.json" if folder is not None else None
    remembered = _read(path) if path is not None else {}
    if key in remembered:
        return min(remembered[key], everything)
    seconds = _measured({count: step_with(count) for count in (1, everything)})
    torch.set_num_threads(everything)
    chosen = everything if seconds[everything] < (1 - _WORTH) * seconds[1] else 1
    if path is not None:
        kept = list(remembered.items())[-_MOST_REMEMBERED:]
        # A cache that can't be written costs a trial the next time, no more.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"threads": {**dict(kept), key: chosen}})
    return chosen


def _measured(steps: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Seconds per step for each number of threads: the best of some rounds taken in turn."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for count, step in steps.items():
            step()
            began, made = time.perf_counter(), 0
            while made < 2 or time.perf_counter() - began < _SECONDS:
                step()
                made += 1
            best[count] = min(best[count], (time.perf_counter() - began) / made)
    return best


def _read(path: Path) -> dict[str, int]:
    try:
        content = read_json(path)["threads"]
    except (AttnlmError, KeyError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {k: v for k, v in content.items() if type(v) is int and v >= 1}
