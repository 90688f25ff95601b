"""The operations of a model, written with PyTorch functions and, for a CPU, also in C.

On a CPU, autograd's many short passes over memory cost as much as the matmuls. Inside the context
`use_kernels`, a training step can therefore compute some operations in C, forward and backward, and
choose between two libraries for matmuls. The reference implementations in PyTorch are used on
other devices, outside of `use_kernels`, and to record a forward pass (see recorder.py).

Axes as in attention.py. `d_x` is the gradient of the loss with respect to x.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlm.compute.native import native_library


@dataclass(frozen=True)
class Kernels:
    """Which implementations compute the operations of a model on a CPU, in float32."""

    native_ops: bool = False
    """Use the operations in C if the package has kernels for this processor."""
    matmul: str = "blas"
    """The library for large matmuls: blas (PyTorch's default) or onednn. With native, whole blocks
    of a transformer are computed in C, and other matmuls by blas."""
    attention: str = "torch"
    """The kernel for causal attention: torch or native (in C)."""


class _Used(threading.local):
    kernels = Kernels()


_used = _Used()


@contextlib.contextmanager
def use_kernels(kernels: Kernels) -> Iterator[None]:
    """Use these kernels for the operations of this thread."""
    before = _used.kernels
    _used.kernels = kernels
    try:
        yield
    finally:
        _used.kernels = before


def kernels_in_use() -> Kernels:
    """Return the kernels that this thread uses."""
    return _used.kernels


def native_ops_for(x: Tensor) -> CDLL | None:
    """Return the compiled operations if they are in use and x is float32 on a CPU, else None."""
    fits = _used.kernels.native_ops and x.is_cpu and x.dtype == torch.float32
    return native_library() if fits else None


def data_pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor's elements, for a compiled function."""
    return None if x is None else x.data_ptr()
