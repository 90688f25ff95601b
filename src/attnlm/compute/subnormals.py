"""Flush subnormal numbers to zero: where attention saturates, probabilities and gradients become
subnormal, and Intel's processors compute with such numbers about a hundred times more slowly.

Each thread has a mode of its own. On Linux a new thread begins with its parent's mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

import torch

_SMALLEST_NORMAL = sys.float_info.min
_SOFT_PAUSE = 1  # omp_pause_soft of <omp.h>


def flushes_subnormals() -> bool:
    """Return True if the calling thread flushes subnormal numbers to zero."""
    return _SMALLEST_NORMAL / 2 == 0.0


class FlushingHere:
    """Flush subnormal numbers in the calling thread, and in the threads that it starts.

    This takes less than a microsecond: it can surround the work for a single token. PyTorch's
    thread pool keeps its mode, if it exists already.
    """

    def __enter__(self) -> None:
        self._before = flushes_subnormals()
        torch.set_flush_denormal(True)

    def __exit__(self, *_: object) -> None:
        torch.set_flush_denormal(self._before)


@contextlib.contextmanager
def flushing_subnormals() -> Iterator[None]:
    """Flush subnormal numbers in the calling thread and in its pool of PyTorch's threads.

    Afterwards both are as before. Other threads that exist already keep their mode.
    """
    before = flushes_subnormals()
    try:
        with FlushingHere():
            if not before:
                _end_torch_pool()
            yield
    finally:
        if not before:
            _end_torch_pool()


def _end_torch_pool() -> None:
    """End the OpenMP threads of the calling thread. New ones will begin in its mode."""
    with contextlib.suppress(AttributeError):  # other runtimes set the mode for each operation
        ctypes.CDLL(torch._C.__file__).omp_pause_resource_all(_SOFT_PAUSE)
