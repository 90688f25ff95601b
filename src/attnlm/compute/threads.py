"""Thread pools, and the flushing mode: whether a thread replaces subnormal numbers by zero.

PyTorch's own threads wait for each other at every operation, so that on a busy machine, each
operation takes as long as its slowest thread. The threads here wait for each other once per step.

If attention saturates, probabilities and gradients become subnormal. Intel's processors compute
with subnormal numbers about a hundred times more slowly, unless the numbers are flushed to zero.
Each thread has its own flushing mode. On Linux, a new thread inherits the mode of its parent.
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
    memory stays bounded. If `function` raises an exception for an item, this generator raises it.
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

    The calling thread runs the first job, then the jobs that no thread of the pool has started,
    since on a busy machine the pool's threads may have no processor. If a job fails or a signal
    comes, this function still waits for the jobs that have started.
    """
    futures = [pool.submit(job) for job in jobs[1:]]
    try:
        first = jobs[0]()
        rest = zip(jobs[1:], futures, strict=True)
        return [first, *(job() if future.cancel() else future.result() for job, future in rest)]
    finally:
        wait([future for future in futures if not future.cancel()])


def new_pool(threads: int, each: int = 1) -> ThreadPoolExecutor:
    """Return a pool of threads. The calling thread is counted as one of the `threads`.

    The number `each` says how many of PyTorch's own threads a thread of the pool uses for an
    operation. The caller must set PyTorch's number of threads to this number too, so that a job's
    result does not depend on the thread that runs the job. The threads of the pool flush subnormal
    numbers if the calling thread does.
    """
    import torch

    flush = flushes_subnormals()

    def begin() -> None:
        torch.set_num_threads(each)
        torch.set_flush_denormal(flush)

    return ThreadPoolExecutor(max(1, threads - 1), "attnlm", initializer=begin)


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Within the context, let PyTorch use `count` threads for the calling thread's operations."""
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


class FlushSubnormals:
    """A context that flushes subnormal numbers in the calling thread and threads that it starts.

    Entering the context takes less than a microsecond, so it can surround the work for a single
    token. If PyTorch's thread pool exists already, the pool keeps its mode.
    """

    def __enter__(self) -> None:
        import torch

        self._before = flushes_subnormals()
        torch.set_flush_denormal(True)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_flush_denormal(self._before)


@contextlib.contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Flush subnormal numbers in the calling thread and PyTorch's thread pool.

    On exit, restore the flushing mode, PyTorch's number of threads and the precision of PyTorch's
    matmuls. Other threads that exist already keep their mode.
    """
    import torch

    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    before = flushes_subnormals()
    try:
        with FlushSubnormals():
            if not before:
                _end_torch_pool()
            yield
    finally:
        if not before:
            _end_torch_pool()
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _end_torch_pool() -> None:
    """End the calling thread's OpenMP threads. New ones will start in the calling thread's mode."""
    import torch

    with contextlib.suppress(AttributeError):  # other runtimes set the mode for each operation
        ctypes.CDLL(torch._C.__file__).omp_pause_resource_all(_SOFT_PAUSE)
