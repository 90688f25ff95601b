"""Small layers (norms, dropout, linear maps), recomputation of layers, and evaluation mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnlm.compute.native import native_library

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture


class Linear(nn.Linear):
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


FEWEST_BY_ONEDNN = 2**20
"""With fewer multiplications, a call to oneDNN (a dozen microseconds) costs more than it saves."""


def linear(x: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, (..., C) → (..., N), by the faster library.

    PyTorch's library for matmuls on x86 is MKL, which does not use AVX-512 on processors that are
    not Intel's. There oneDNN, its other library, takes half the time.
    """
    if (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype == weight_NC.dtype == torch.float32
        and x.numel() * len(weight_NC) >= FEWEST_BY_ONEDNN
        and faster_linear() is not None
        and not torch.is_autocast_enabled("cpu")
    ):
        out: Tensor = _OneDNNLinear.apply(x, weight_NC, bias_N)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight_NC, bias_N)


@functools.cache
def faster_linear() -> Callable[..., Tensor] | None:
    """Return oneDNN's linear map if it is faster than PyTorch's on this processor, else None."""
    by_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    native = native_library()
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if by_onednn is None or native is None or native.is_intel() or not has_avx512:
        return None
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    with contextlib.suppress(RuntimeError):
        if torch.equal(by_onednn(x, weight, None, "none", [], ""), F.linear(x, weight)):
            return by_onednn  # type: ignore[no-any-return]
    return None


class _OneDNNLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NC)
        by_onednn = faster_linear()
        assert by_onednn is not None
        out_MN = by_onednn(x.flatten(0, -2), weight_NC, bias_N, "none", [], "")
        return out_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NC = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            linear(grad_MN, weight_NC.T).view(x.shape) if to_x else None,
            linear(grad_MN.T, x.flatten(0, -2).T) if to_weight else None,
            grad_MN.sum(0) if to_bias else None,
        )


class RMSNorm(nn.Module):
    """RMS norm, x / √(mean x² + ε) · gain (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C) → (..., C)."""
        return F.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), self.epsilon)


class LayerNorm(nn.Module):
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


class Dropout(nn.Dropout):
    """Zero numbers with probability p and divide the others by 1 − p (Srivastava et al., 2014)."""

    generators: Sequence[torch.Generator] = ()
    """one for each sequence of a batch, so that draws do not depend on how a batch is divided among
    processes and threads; empty for PyTorch's own generator"""

    @property
    def is_active(self) -> bool:
        """Return True if the layer drops numbers."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout, (B, ...) → (B, ...)."""
        factors = self.factors(x) if self.generators else None
        return super().forward(x) if factors is None else x * factors

    def factors(self, x: Tensor) -> Tensor | None:
        """Return the factors by which the layer multiplies x; None if it drops nothing."""
        if not self.is_active:
            return None
        kept = torch.empty_like(x)
        if not self.generators:
            return F.dropout(kept.fill_(1), self.p)
        for sequence, generator in zip(kept, self.generators, strict=True):
            sequence.bernoulli_(1 - self.p, generator=generator)
        return kept.div_(1 - self.p)


def drop_by(model: nn.Module, generators: Sequence[torch.Generator]) -> None:
    """Let each dropout of a model use generator i for sequence i of a batch."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.generators = generators


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


def recomputed(module: nn.Module, generators: Sequence[torch.Generator], *arguments: Any) -> Tensor:
    """Return the output of `module`, and recompute it in the backward pass.

    Between the two passes, only the arguments are in memory (Chen et al., 2016). The recomputation
    repeats the random draws: PyTorch restores its random state, and `compute` that of `generators`.
    After the backward pass, they must be seeded again.
    """
    states = [generator.get_state() for generator in generators]

    def compute(*arguments: Any) -> Any:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return module(*arguments)

    # PyTorch cannot compile `compute`, but a compiled training step sets no generators.
    function = compute if generators else module
    computed: Tensor = checkpoint(function, *arguments, use_reentrant=False)
    return computed
