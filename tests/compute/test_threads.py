"""Work that threads share, and work that they do ahead, with its errors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnlm.compute.threads import computing, map_ahead, new_pool


@pytest.mark.parametrize(("count", "workers"), [(0, 2), (1, 5), (2, 1), (40, 1), (40, 5)])
def test_results_come_in_the_order_of_the_items(count: int, workers: int) -> None:
    assert list(map_ahead(str, range(count), workers)) == [str(i) for i in range(count)]


def test_workers_work_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)
    assert sorted(map_ahead(lambda _: both.wait(), range(2), workers=2)) == [0, 1]


def test_items_are_drawn_by_the_caller_and_not_far_ahead() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            assert threading.current_thread() is threading.main_thread()
            drawn.append(i)
            yield i

    results = map_ahead(lambda i: i, items(), workers=2)
    for done in range(10):
        assert next(results) == done
        assert len(drawn) <= done + 3
    results.close()
    assert len(drawn) <= 12


def test_an_error_is_raised_in_place_of_its_result() -> None:
    results = map_ahead(lambda i: 10 // (2 - i), range(9), workers=2)
    assert [next(results), next(results)] == [5, 10]
    with pytest.raises(ZeroDivisionError):
        next(results)


def compute_all(jobs: Sequence[Callable[[], int]], pool: ThreadPoolExecutor) -> list[int]:
    """Return the results of jobs, of which the calling thread takes the first."""
    with computing(jobs[1:], pool) as others:
        return [jobs[0](), *others()]


def test_a_failure_waits_for_running_jobs() -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        time.sleep(0.05)
        ended.set()
        return 2

    def fails() -> int:
        begun.wait()
        raise ValueError("on purpose")

    with new_pool(2) as pool:
        assert compute_all([lambda: 1, slow], pool) == [1, 2]
        for jobs in ([fails, slow], [slow, fails]):
            begun.clear()
            ended.clear()
            with pytest.raises(ValueError, match="on purpose"):
                compute_all(jobs, pool)
            assert ended.is_set()


@contextlib.contextmanager
def occupied(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Keep the other threads of a pool busy."""
    free = threading.Event()
    for _ in range(pool._max_workers):
        pool.submit(free.wait)
    try:
        yield
    finally:
        free.set()


def test_the_calling_thread_takes_jobs_that_no_worker_has_started() -> None:
    with new_pool(3) as pool:
        with occupied(pool):
            here = threading.get_ident()
            assert compute_all([threading.get_ident] * 3, pool) == [here] * 3
            with pytest.raises(ZeroDivisionError):
                compute_all([lambda: 1, lambda: 1 // 0, lambda: pytest.fail("is done")], pool)
        all_here = threading.Barrier(3)

        def meets() -> int:
            all_here.wait(20)
            return threading.get_ident()

        assert len(set(compute_all([meets] * 3, pool))) == 3
