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
    """The output of `module`, of whose computation nothing but the arguments is kept."""
    computed: Tensor = checkpoint(module, *arguments, use_reentrant=False, context_fn=_same_draws)
    return computed


def _same_draws() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Around the computation, and around its repetition, which drops what was dropped before.

    PyTorch does that for its own random state; the generators of windows are ours.
    """
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
