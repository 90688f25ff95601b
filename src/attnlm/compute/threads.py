"""Threads that work side by side, and whether they flush subnormal numbers to zero.

PyTorch's own threads wait for each other at every operation: on a busy machine a step then takes as
long as its unluckiest operations together. The threads here meet once a step.

Where attention saturates, probabilities and gradients become subnormal, and Intel's processors
compute with such numbers about a hundred times more slowly. Each thread has a mode of its own. On
Linux a new thread begins with its parent's mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_SMALLEST_NORMAL = sys.float_info.min
_SOFT_PAUSE = 1  # omp_pause_soft of <omp.h>


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int = 1
) -> Generator[_Result, None, None]:
    """`map` in the order of `items`, with threads that work while the caller does.

    The items are drawn in the caller's thread, and at most `workers` + 1 are under way, so that
    memory stays bounded. What `function` raises is raised where its result was due.
    """
    under_way: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) > workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def compute_all(jobs: Sequence[Callable[[], _Result]], pool: ThreadPoolExecutor) -> list[_Result]:
    """Return the results of all jobs, in order.

    The calling thread does the first job, and then those that no thread of the pool has started: on
    a busy machine it may have a processor while they have none. If a job fails, or a signal comes,
    those under way are waited for all the same.
    """
    futures = [pool.submit(job) for job in jobs[1:]]
    try:
        first = jobs[0]()
        rest = zip(jobs[1:], futures, strict=True)
        return [first, *(job() if future.cancel() else future.result() for job, future in rest)]
    finally:
        wait([future for future in futures if not future.cancel()])


def new_pool(threads: int, each: int = 1) -> ThreadPoolExecutor:
    """Return a pool of threads beside the calling one, `threads` in all.

    Each computes with `each` of PyTorch's own threads, and flushes subnormal numbers if the calling
    thread does. The calling thread has to do so too, since any of them may do a job, and numbers
    must not depend on which.
    """
    import torch

    flush = flushes_subnormals()

    def begin() -> None:
        torch.set_num_threads(each)
        torch.set_flush_denormal(flush)

    return ThreadPoolExecutor(max(1, threads - 1), "attnlm", initializer=begin)


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Let PyTorch use `count` threads for an operation of the calling thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        _set_flushing(True)

    def __exit__(self, *_: object) -> None:
        _set_flushing(self._before)


def _set_flushing(wanted: bool) -> None:
    import torch

    torch.set_flush_denormal(wanted)


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
    import torch

    with contextlib.suppress(AttributeError):  # other runtimes set the mode for each operation
        ctypes.CDLL(torch._C.__file__).omp_pause_resource_all(_SOFT_PAUSE)
