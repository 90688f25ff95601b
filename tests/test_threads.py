from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnlm.compute import threads
from attnlm.compute.threads import choose_threads
from tests.clock import Clock


@pytest.fixture(autouse=True)
def four_threads_and_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    monkeypatch.setattr(threads, "_SECONDS", 0.0)
    clock = Clock(monkeypatch)
    monkeypatch.setattr(time, "sleep", clock.advance)
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "threads.json"


class Step:
    """A step that takes as long as told, for each number of threads."""

    def __init__(self, one: float, all_: float) -> None:
        self.seconds = {1: one, 4: all_}
        self.made = 0

    def __call__(self, count: int) -> Callable[[], None]:
        def step() -> None:
            torch.set_num_threads(1)  # as steps of shared batches do
            self.made += 1
            time.sleep(self.seconds[count])  # of the clock below

        return step


def test_the_faster_number_is_taken_and_remembered(four_threads_and_a_cache: Path) -> None:
    assert choose_threads(1e6, ["small"], Step(one=0.001, all_=0.02)) == 1
    assert choose_threads(1e6, ["wide"], Step(one=0.02, all_=0.001)) == 4
    for about, expected in (("small", 1), ("wide", 4)):
        again = Step(one=0, all_=0)
        assert choose_threads(1e6, [about], again) == expected
        assert again.made == 0
    assert four_threads_and_a_cache.is_file()


def test_a_trial_leaves_all_threads_to_the_next(four_threads_and_a_cache: Path) -> None:
    choose_threads(1e6, ["small"], Step(one=0.001, all_=0.02))
    assert torch.get_num_threads() == 4


def test_threads_that_save_nothing_are_left_to_others() -> None:
    assert choose_threads(1e6, ["even"], Step(one=0.005, all_=0.005)) == 1


def test_large_steps_take_all_threads_without_a_trial() -> None:
    step = Step(one=0, all_=0)
    assert choose_threads(1e11, ["large"], step) == 4
    assert step.made == 0


@pytest.mark.parametrize("content", ["", "[]", '{"threads": 3}', '{"threads": {"a": "b"}}'])
def test_a_damaged_memory_is_made_anew(content: str, four_threads_and_a_cache: Path) -> None:
    four_threads_and_a_cache.parent.mkdir()
    four_threads_and_a_cache.write_text(content)
    assert choose_threads(1e6, ["small"], Step(one=0.001, all_=0.02)) == 1
    step = Step(one=0, all_=0)
    assert choose_threads(1e6, ["small"], step) == 1
    assert step.made == 0


def test_a_cache_that_cannot_be_written_costs_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLM_CACHE_DIR", "/dev/null/nowhere")
    for _ in range(2):
        step = Step(one=0.001, all_=0.02)
        assert choose_threads(1e6, ["small"], step) == 1
        assert step.made > 0
