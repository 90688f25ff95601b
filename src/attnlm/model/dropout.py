"""Dropout whose draws belong to windows of the text, however a batch is cut into parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Source(threading.local):
    generators: Sequence[torch.Generator] = ()


_source = _Source()


@contextlib.contextmanager
def drawing_from(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """In this thread window i of a batch draws from generator i; without any, from torch's own."""
    before, _source.generators = _source.generators, generators
    try:
        yield
    finally:
        _source.generators = before


def generators() -> Sequence[torch.Generator]:
    """Those that this thread draws from."""
    return _source.generators


def dropout(x: Tensor, p: float) -> Tensor:
    """Zeros with probability p, the rest divided by 1 − p (Srivastava et al., 2014): (B, ...)."""
    if not _source.generators:
        return F.dropout(x, p)
    kept = torch.empty_like(x)
    for window, generator in zip(kept, _source.generators, strict=True):
        window.bernoulli_(1 - p, generator=generator)
    return x * kept.div_(1 - p)


class Dropout(nn.Module):
    """`dropout`, in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) → (B, ...)."""
        return dropout(x, self.p) if self.p and self.training else x
