"""Operations that a model is made of, in PyTorch's own calls and, for a CPU, in compiled ones.

On a CPU autograd's many short passes over memory cost as much as the products. So a step that was
asked to (`compiled_parts`) takes some of them in C, forward and backward; every other device, and
whoever watches a model, takes the plain forms, which tests hold the compiled ones to.

Axes as in attention.py. `d_x` is the gradient of the loss by x.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from ctypes import CDLL

import torch
from torch import Tensor

from attnlm.compute.native import library


class _Asked(threading.local):
    parts: CDLL | None = None


_asked = _Asked()


def pointwise() -> CDLL | None:
    """The compiled operations; None where there is no compiler."""
    return library("pointwise.c")


@contextlib.contextmanager
def compiled_parts(wanted: bool) -> Iterator[None]:
    """Whether operations of this thread take their compiled forms, where there are any."""
    before, _asked.parts = _asked.parts, pointwise() if wanted else None
    try:
        yield
    finally:
        _asked.parts = before


def compiled_for(x: Tensor) -> CDLL | None:
    """The compiled operations, if they were asked for and are for such numbers."""
    parts = _asked.parts
    return parts if parts is not None and x.is_cpu and x.dtype == torch.float32 else None


def place(x: Tensor | None) -> int | None:
    """Where a tensor's numbers lie, for a compiled function."""
    return None if x is None else x.data_ptr()
