"""Choices by timing: of several ways to compute the same, the fastest on this machine.

Processors differ in which matmul library is faster, and in how much a second thread helps. The ways
are therefore timed, and the choice is remembered, instead of chosen by the processor's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from attnlm.base.caches import cache_folder
from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_json, write_json
from attnlm.base.records import decoded
from attnlm.compute.native import processor
from attnlm.compute.threads import flushing_subnormals

_ROUNDS, _SECONDS = 3, 0.01
_FAR = 10.0  # a way that is this much slower than the fastest is not timed again
_MOST_REMEMBERED = 256
# Environment variables that limit the instructions that PyTorch's libraries use.
_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True)
class Choice:
    """One remembered choice: its kind and sizes, the way chosen, and the time of each way."""

    kind: str
    sizes: str
    chosen: str
    milliseconds: Mapping[str, float]


@contextlib.contextmanager
def keeping_threads() -> Iterator[None]:
    """Flush subnormal numbers to zero within the context. On exit, restore the flushing mode,
    PyTorch's number of threads and the precision of PyTorch's matmuls."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        with flushing_subnormals():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def fastest(
    kind: str,
    sizes: str,
    ways: Mapping[str, Callable[[], object]],
    *,
    about: object = None,
    worth: float = 0.0,
) -> str:
    """Return the name of the fastest of several ways to do the same work.

    The first way is returned unless the fastest saves more than the fraction `worth` of the first
    way's time. The choice is remembered under a key that consists of `kind`, `sizes`, the names of
    the ways, the machine, and the JSON values in `about`. So the same configuration gives the same
    numbers again.
    """
    limits = [os.environ.get(name, "") for name in _LIMITS]
    machine = [processor(), os.cpu_count(), torch.__version__, limits]
    described = json.dumps([[kind, sizes, list(ways), about], machine])
    path, key = _path(), hashlib.sha256(described.encode()).hexdigest()[:32]
    remembered = _read(path)
    if key in remembered and remembered[key].chosen in ways:
        return remembered[key].chosen
    with keeping_threads():
        seconds = _measured(ways)
    first = next(iter(ways))
    best = min(ways, key=lambda name: seconds[name])
    chosen = best if seconds[best] < (1 - worth) * seconds[first] else first
    choice = Choice(kind, sizes, chosen, {n: round(1e3 * s, 4) for n, s in seconds.items()})
    # Keep the choices that other processes have written since.
    kept = dict(list(_read(path).items())[1 - _MOST_REMEMBERED :]) | {key: choice}
    # If the cache can't be written, the next call only has to time the ways again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"choices": {key: asdict(choice) for key, choice in kept.items()}})
    return chosen


def remembered_choices() -> list[Choice]:
    """Return the choices made so far on this machine, the newest last."""
    return list(_read(_path()).values())


def _path() -> Path:
    # Without a cache folder, nothing can be read or written.
    return (cache_folder() or Path(os.devnull)) / "choices.json"


def _measured(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds per call of each way: the minimum over `_ROUNDS` rounds.

    A way that is far slower than the fastest is timed in the first round only. This saves time:
    while other processes are busy, several threads that wait for each other can be hundreds of
    times slower than a single thread.
    """
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(_ROUNDS):
        near = _FAR * min(best.values())
        for name in [name for name in ways if best[name] <= near]:
            way = ways[name]
            way()
            began, made = time.perf_counter(), 0
            while made < 1 or time.perf_counter() - began < _SECONDS:
                way()
                made += 1
            best[name] = min(best[name], (time.perf_counter() - began) / made)
    return best


def _read(path: Path) -> dict[str, Choice]:
    """Return the choices in a file, or an empty dictionary if the file is missing or damaged."""
    try:
        content = read_json(path)["choices"]
        return {key: decoded(Choice, choice, path) for key, choice in content.items()}
    except (AttnlmError, KeyError, AttributeError):
        return {}
