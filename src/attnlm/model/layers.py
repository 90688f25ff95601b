"""Small layers (norms, dropout, linear maps), recomputation of layers, and evaluation mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from attnlm.model.architecture import Architecture
from attnlm.model.ops.linear import linear
from attnlm.model.ops.pointwise import rms_norm


class Hookable(nn.Module):
    """A module whose weights may be used without a call, which is faster, if it has no hooks."""

    has_hooks = False
    """True once a hook was registered"""

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        self.has_hooks = True
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        self.has_hooks = True
        return super().register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        self.has_hooks = True
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        self.has_hooks = True
        return super().register_full_backward_hook(*args, **kwargs)


def is_plain(module: nn.Module | None, kind: type[Hookable]) -> bool:
    """Return True if a call of the module does nothing but compute the `forward` of `kind`.

    Otherwise, the module must be called: it has hooks, or it is of another class.
    """
    return type(module) is kind and not module.has_hooks and "forward" not in vars(module)


class Linear(Hookable, nn.Linear):
    """A linear map x Wᵀ + b.

    Weights are initialised from N(0, std²) and biases to zeros. If `std` is None, both are
    initialised as in nn.Linear.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, std: float | None = None
    ) -> None:
        self._std = std
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        if self._std is None:
            super().reset_parameters()
            return
        nn.init.normal_(self.weight, std=self._std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) → (..., outputs)."""
        return linear(x, self.weight, self.bias)


def joined_linear(x: Tensor, maps: Sequence[nn.Module]) -> Tensor:
    """Return the concatenated outputs of `maps`: (..., C) → (..., N), N the sum of their widths.

    One matmul with joined weights is faster. The maps are called one by one, however, if they are
    not plain, or if their weights are frozen, as for sampling in bfloat16, which would copy the
    weights again for each token.
    """
    plain = [m for m in maps if isinstance(m, Linear) and is_plain(m, Linear)]
    if len(plain) < len(maps) or not plain[0].weight.requires_grad:
        return torch.cat([m(x) for m in maps], dim=-1)
    bias_N = None if plain[0].bias is None else torch.cat([m.bias for m in plain])
    return linear(x, torch.cat([m.weight for m in plain]), bias_N)


class RMSNorm(Hookable):
    """RMS norm, x / √(mean x² + ε) · gain (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) → (..., C)."""
        return rms_norm(x, self.gain, self.epsilon)


class LayerNorm(Hookable):
    """Layer norm, (x − mean) / √(variance + ε) · gain + bias (Ba et al., 2016)."""

    def __init__(self, size: int, epsilon: float, *, bias: bool) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) → (..., C)."""
        return F.layer_norm(x, self.gain.shape, self.gain, self.bias, self.epsilon)


def build_norm(a: Architecture, size: int) -> RMSNorm | LayerNorm | None:
    """Return the architecture's norm over `size` features, if it has a norm, else None."""
    if a.norm == "rms":
        return RMSNorm(size, a.norm_epsilon)
    return LayerNorm(size, a.norm_epsilon, bias=a.bias) if a.norm == "layer" else None


class _DropoutSource(threading.local):
    generators: Sequence[torch.Generator] = ()


_dropout_source = _DropoutSource()


@contextlib.contextmanager
def dropout_from(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Let dropout in this thread use generator i for sequence i of a batch.

    The draws then do not depend on how a batch is divided among processes and threads.
    If `generators` is empty, dropout uses PyTorch's generator.
    """
    before = _dropout_source.generators
    _dropout_source.generators = generators
    try:
        yield
    finally:
        _dropout_source.generators = before


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero numbers with probability p and divide the others by 1 − p (Srivastava et al., 2014)."""
    return x * dropout_factors(x, p) if _dropout_source.generators else F.dropout(x, p)


def dropout_factors(x: Tensor, p: float) -> Tensor:
    """Return the factors by which `dropout` multiplies x."""
    kept = torch.empty_like(x)
    if not _dropout_source.generators:
        return F.dropout(kept.fill_(1), p)
    for sequence, generator in zip(kept, _dropout_source.generators, strict=True):
        sequence.bernoulli_(1 - p, generator=generator)
    return kept.div_(1 - p)


class Dropout(Hookable, nn.Dropout):
    """A layer that applies `dropout` in training."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout, (B, ...) → (B, ...)."""
        return dropout(x, self.p) if self.p and self.training else x


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode. On exit, restore the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])  # own code may do more in `train` than set the mode
        for module, was_training in before:
            module.training = was_training


def recomputed(module: nn.Module, *arguments: Any) -> Tensor:
    """Return the output of `module`, and recompute it in the backward pass.

    Between the two passes, only the arguments are in memory (Chen et al., 2016). The recomputation
    repeats the random draws: PyTorch restores its random state, and `compute` restores the
    generators that `dropout_from` has set. After the backward pass, they must be seeded again.
    """
    generators = _dropout_source.generators
    states = [generator.get_state() for generator in generators]

    def compute(*arguments: Any) -> Any:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return module(*arguments)

    # PyTorch cannot compile `compute`, but a compiled training step sets no generators.
    function = compute if generators else module
    computed: Tensor = checkpoint(function, *arguments, use_reentrant=False)
    return computed
