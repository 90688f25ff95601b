"""Recorded calls, with a stand-in for CUDA that calls the function when it is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from attnlm.training.cuda_graph import FIRST_CALLS, CudaGraph


class Recording:
    """A stand-in for torch.cuda.CUDAGraph that counts its replays."""

    replays = 0

    def replay(self) -> None:
        Recording.replays += 1


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace what a recording needs; return the streams that were restored."""
    restored: list[object] = []

    @contextlib.contextmanager
    def recorded(graph: Recording) -> Iterator[None]:
        yield

    Recording.replays = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", restored.append)
    return restored


def test_the_first_calls_run_the_function_and_later_ones_copy_their_inputs() -> None:
    seen: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return 2 * x

    graph: CudaGraph[torch.Tensor] = CudaGraph()
    results = [graph.call(double, torch.full((2,), float(i))) for i in range(FIRST_CALLS + 2)]
    first = FIRST_CALLS - 2
    assert [r.tolist() for r in results[:first]] == [[2.0 * i] * 2 for i in range(first)]
    assert len(seen) == FIRST_CALLS - 1  # the last of them was recorded
    assert Recording.replays == 4
    assert seen[-1].tolist() == [FIRST_CALLS + 1.0] * 2
    with pytest.raises(ValueError, match="recorded for"):
        graph.call(double, torch.zeros(1))


def test_a_function_that_cannot_be_recorded_is_called_as_before(cuda: list[object]) -> None:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        if calls == FIRST_CALLS - 1:
            raise torch.OutOfMemoryError
        return calls

    graph: CudaGraph[int] = CudaGraph()
    assert [graph.call(count) for _ in range(6)] == [1, 2, 3, 5, 6, 7]
    assert Recording.replays == 0 and cuda == ["stream"]
