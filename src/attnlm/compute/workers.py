"""Threads that compute side by side, each without PyTorch's own threads.

PyTorch's threads wait for each other at every operation: on a busy machine a step then takes as
long as its unluckiest operations together. These meet once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Result = TypeVar("Result")


def compute_all(jobs: Sequence[Callable[[], Result]], pool: ThreadPoolExecutor) -> list[Result]:
    """Their results in order; the first job is done by the calling thread.

    When one fails, or a signal comes, the others are waited for all the same.
    """
    futures = [pool.submit(job) for job in jobs[1:]]
    try:
        first = [job() for job in jobs[:1]]
        return [*first, *(future.result() for future in futures)]
    finally:
        wait(futures)


def new_pool(threads: int) -> ThreadPoolExecutor:
    """Threads beside the calling one, `threads` in all; they end with the pool."""
    return ThreadPoolExecutor(
        max(1, threads - 1), "attnlm", initializer=torch.set_num_threads, initargs=(1,)
    )


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """PyTorch's own threads for one operation, in the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
