"""Work on the pieces of a long text, done by threads while the next pieces are read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def cores() -> int:
    """How many this process may use."""
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
