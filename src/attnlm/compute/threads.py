"""Thread pools, and threads that replace subnormal numbers by zero.

PyTorch's own threads wait for each other at every operation, so that on a busy machine, each
operation takes as long as its slowest thread. The threads here wait for each other once per step.

If attention saturates, probabilities and gradients become subnormal. Intel's processors compute
with subnormal numbers about a hundred times more slowly, unless the numbers are flushed to zero.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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


@contextlib.contextmanager
def computing(
    jobs: Sequence[Callable[[], _Result]], pool: ThreadPoolExecutor
) -> Iterator[Callable[[], list[_Result]]]:
    """Compute jobs in threads while the caller works; yield a function that returns their results.

    That function runs the jobs that no thread of the pool has started, since on a busy machine the
    pool's threads may have no processor. If a job fails or a signal comes, this context still waits
    for the jobs that have started.
    """
    futures = [pool.submit(job) for job in jobs]
    pairs = list(zip(jobs, futures, strict=True))
    try:
        yield lambda: [job() if future.cancel() else future.result() for job, future in pairs]
    finally:
        wait([future for future in futures if not future.cancel()])


def new_pool(threads: int, each: int = 1) -> ThreadPoolExecutor:
    """Return a pool of threads. The calling thread is counted as one of the `threads`.

    The number `each` says how many of PyTorch's own threads a thread of the pool uses for an
    operation. The caller must set PyTorch's number of threads to this number too, so that a job's
    result does not depend on the thread that runs the job. The threads of the pool flush subnormal
    numbers.
    """
    import torch

    def begin() -> None:
        torch.set_num_threads(each)
        flush_subnormals()

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


def flush_subnormals() -> None:
    """Flush subnormal numbers to zero in the calling thread from now on.

    On Linux, threads that it starts flush them too.
    """
    import numpy as np
    import torch

    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # NumPy before version 2 warns if it computes them later
    torch.set_flush_denormal(True)


@contextlib.contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Restore PyTorch's number of threads and the precision of its matmuls at the end.

    Begin with `flush_subnormals`, which stays.
    """
    import torch

    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    flush_subnormals()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
