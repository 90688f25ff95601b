"""Work done ahead by threads comes in order, a little at a time, with its errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from attnlm.compute.threads import map_ahead


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
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
