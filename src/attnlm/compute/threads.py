"""Thread pools, and whether their threads flush subnormal numbers to zero.

PyTorch's own threads wait for each other at every operation. On a busy machine, each operation of a
step takes as long as its slowest thread. The threads here wait for each other once per step.

If attention saturates, probabilities and gradients become subnormal, and Intel's processors compute
with such numbers about a hundred times more slowly. Each thread has its own flushing mode. On
Linux, a new thread inherits the mode of its parent.
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
    """Yield `function(item)` for all items, in order, computed in threads while the caller works.

    The items are drawn in the caller's thread, and at most `workers` + 1 are pending, so that
    memory stays bounded. An exception of `function` is raised in place of the result.
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

    The calling thread runs the first job, and then jobs that no thread of the pool has started. On
    a busy machine, the calling thread may have a processor while the pool has none. If a job fails
    or a signal comes, this function still waits for jobs that have started.
    """
    futures = [pool.submit(job) for job in jobs[1:]]
    try:
        first = jobs[0]()
        rest = zip(jobs[1:], futures, strict=True)
        return [first, *(job() if future.cancel() else future.result() for job, future in rest)]
    finally:
        wait([future for future in futures if not future.cancel()])


def new_pool(threads: int, each: int = 1) -> ThreadPoolExecutor:
    """Return a pool of `threads` threads, counting the calling thread.

    Each thread of the pool computes with `each` of PyTorch's own threads, and flushes subnormal
    numbers if the calling thread does. The calling thread must compute in the same way, since any
    thread may run a job, and the results must not depend on which thread does.
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
    """A context that flushes subnormal numbers in the calling thread and threads that it starts.

    Entering it takes less than a microsecond, so it can surround the work for a single token.
    If PyTorch's thread pool exists already, the pool keeps its mode.
    """

    def __enter__(self) -> None:
        import torch

        self._before = flushes_subnormals()
        torch.set_flush_denormal(True)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_flush_denormal(self._before)


@contextlib.contextmanager
def flushing_subnormals() -> Iterator[None]:
    """Flush subnormal numbers in the calling thread and in its PyTorch thread pool.

    Both modes are restored afterwards. Other threads that exist already keep their mode.
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
    """End the OpenMP threads of the calling thread. New threads will start in its mode."""
    import torch

    with contextlib.suppress(AttributeError):  # other runtimes set the mode for each operation
        ctypes.CDLL(torch._C.__file__).omp_pause_resource_all(_SOFT_PAUSE)
