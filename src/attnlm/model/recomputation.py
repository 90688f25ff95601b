"""Activations that are computed again on the way back, not kept (Chen et al., 2016)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnlm.model.dropout import generators


def recomputed(module: nn.Module, *arguments: Any) -> Tensor:
    """Return the output of `module`; of its computation only the arguments are kept.

    PyTorch restores its own random state for the repetition. The generators of windows are ours;
    a compiled step, in which PyTorch allows no such context, has none.
    """
    more: Any = {"context_fn": _same_draws} if generators() else {}
    computed: Tensor = checkpoint(module, *arguments, use_reentrant=False, **more)
    return computed


def _same_draws() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Return contexts for the computation and for its repetition, which draws the same numbers."""
    ours, states = generators(), [generator.get_state() for generator in generators()]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        later = [generator.get_state() for generator in ours]
        _restore(ours, states)
        yield
        _restore(ours, later)

    return contextlib.nullcontext(), again()


def _restore(ours: Any, states: list[Tensor]) -> None:
    generator: torch.Generator
    for generator, state in zip(ours, states, strict=True):
        generator.set_state(state)
