"""Threads that compute side by side.

PyTorch's own threads wait for each other at every operation: on a busy machine a step then takes as
long as its unluckiest operations together. These meet once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from attnlm.compute.subnormals import flushes_subnormals

Result = TypeVar("Result")


def compute_all(jobs: Sequence[Callable[[], Result]], pool: ThreadPoolExecutor) -> list[Result]:
    """Their results in order. The calling thread does the first job, and then those that no thread
    of the pool has begun: on a busy machine it may have a processor while they have none.

    When one fails, or a signal comes, those under way are waited for all the same.
    """
    futures = [pool.submit(job) for job in jobs[1:]]
    try:
        first = [job() for job in jobs[:1]]
        rest = zip(jobs[1:], futures, strict=True)
        return [*first, *(job() if future.cancel() else future.result() for job, future in rest)]
    finally:
        wait([future for future in futures if not future.cancel()])


def new_pool(threads: int, each: int = 1) -> ThreadPoolExecutor:
    """Threads beside the calling one, `threads` in all; they end with the pool.

    Each computes with as many of PyTorch's own as `each`, and flushes subnormal numbers if the
    calling thread does. The calling thread is to do so too, since any of them may do a job, and
    numbers must not depend on which.
    """
    flush = flushes_subnormals()

    def begin() -> None:
        torch.set_num_threads(each)
        torch.set_flush_denormal(flush)

    return ThreadPoolExecutor(max(1, threads - 1), "attnlm", initializer=begin)


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """PyTorch's own threads for one operation, in the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
