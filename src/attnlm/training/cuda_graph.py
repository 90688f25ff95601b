"""CUDA graphs, which launch all kernels of a step at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig

Result = TypeVar("Result")

# Calls before the recording. In them, libraries choose kernels, and torch.compile compiles.
_WARM_UP = 3
FIRST_CALLS = _WARM_UP + 2
"""Calls up to the first that is as fast as all later ones: measurements begin after it."""


def can_record_updates(training: TrainingConfig, device: str) -> bool:
    """Return True if the optimizer's updates can be recorded as a CUDA graph.

    PyTorch calls AMD's GPUs cuda too; recordings were not tested there.
    """
    is_nvidia = device == "cuda" and torch.version.hip is None
    return is_nvidia and training.processes == 1


def can_record_gradients(config: Config, device: str) -> bool:
    """Return True if the forward and backward passes can be recorded as a CUDA graph.

    Own code may read numbers on the CPU or differ from call to call.
    """
    return not config.codes and can_record_updates(config.training, device)


class CudaGraph(Generic[Result]):
    """Calls of a function on a CUDA device, recorded once, then replayed.

    Launching the kernels of a small model one by one takes many times longer than their work. A
    replay launches them together (PyTorch, "CUDA semantics", section "CUDA Graphs"). It repeats
    the same operations on the same memory: the function must not depend on numbers other than
    those in its arguments and in tensors that stay where they are.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._result: Result

    def call(self, function: Callable[..., Result], *inputs: Tensor) -> Result:
        """Return the result of the function, always the same one, for inputs of the same shapes.

        The first calls run the function, and so do all if it can't be recorded. The next call
        overwrites the tensors of the result.
        """
        if self._calls == _WARM_UP:
            self._record(function, inputs)
        self._calls += 1
        if self._graph is None:
            return function(*inputs)
        for recorded, current in zip(self._inputs, inputs, strict=True):
            if recorded.shape != current.shape:  # a copy would be broadcast
                raise ValueError(f"recorded for {recorded.shape}, called with {current.shape}")
            recorded.copy_(current)
        self._graph.replay()
        return self._result

    def _record(self, function: Callable[..., Result], inputs: tuple[Tensor, ...]) -> None:
        """Record the function. If that fails, as for lack of memory, nothing has changed."""
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        self._inputs = tuple(x.clone() for x in inputs)
        try:
            with torch.cuda.graph(graph):
                self._result = function(*self._inputs)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a failed recording leaves its own stream in use
        else:
            self._graph = graph
