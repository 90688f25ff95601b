"""Tolerances that scale with the summands, for every processor.

Each processor has its own order of sums, and so its own rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Results = Iterable[Tensor] | Mapping[str, Tensor]

_SAMPLES = 3
_MARGIN = 100.0
"""Largest error in multiples of the expected one. Below 10 was seen for models, and 45 where 257
numbers of one sign are added up one after the other."""
_TINY = torch.finfo(torch.float32).tiny


class _RandomRounding(TorchDispatchMode):
    """Rounds the inputs of every operation in float64 as float32 would, but at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func._schema.is_mutable):
            args = tree_map_only(Tensor, self._rounded, args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return x
        error = torch.rand(x.shape, dtype=x.dtype, generator=self._random) - 0.5
        return x * (1 + error * torch.finfo(torch.float32).eps)


def rounding_errors(
    found: Results, reference: Callable[..., Results], *inputs: Any
) -> dict[Any, float]:
    """Return the error of each tensor, in multiples of what rounding to float32 explains.

    `reference(*inputs)` is the same in float64. It is called again with random rounding: the
    movement of its results is the error that is expected (stochastic arithmetic: Vignes, 2004). A
    gradient that is 0 in exact arithmetic moves by the rounding of the numbers that cancel.
    """
    exact = _named(reference(*inputs))
    moved = dict.fromkeys(exact, 0.0)
    for seed in range(_SAMPLES):
        with _RandomRounding(seed):
            rounded = _named(reference(*inputs))
        for name, x in rounded.items():
            moved[name] += (x - exact[name]).square().sum().item() / _SAMPLES
    errors = {}
    for name, x in _named(found).items():
        assert x.shape == exact[name].shape and exact[name].dtype == torch.float64, name
        expected = moved[name] ** 0.5 + _TINY * x.numel() ** 0.5
        errors[name] = torch.linalg.vector_norm(x.double() - exact[name]).item() / expected
    assert errors.keys() == exact.keys()
    return errors


def assert_rounded(found: Results, reference: Callable[..., Results], *inputs: Any) -> None:
    """Assert that float32 results differ from a float64 reference by rounding alone."""
    for name, error in rounding_errors(found, reference, *inputs).items():
        assert error <= _MARGIN, f"{name}: the error is {error:.3g} times that of rounding"


def assert_computes(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """Assert that `ours` in float32 has the values and gradients of `reference` in float64."""
    found = with_gradients(ours, *(x.detach().float().requires_grad_() for x in inputs))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert_rounded(found, with_gradients, reference, *exact)


def with_gradients(op: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    """Return the output of an operation, and the gradient of each input if the output has one."""
    out = op(*inputs)
    random = torch.Generator().manual_seed(3)
    axes = tuple(range(out.dim()))[::-1]  # a memory layout that no kernel expects
    d_out = torch.randn(out.shape[::-1], generator=random).permute(axes)
    gradients = torch.autograd.grad(out, inputs, d_out.to(out))
    return {"output": out, **{f"gradient {i}": d_x for i, d_x in enumerate(gradients)}}


def assert_near(
    found: Tensor | NDArray[Any] | Results,
    expected: Tensor | NDArray[Any] | Results,
    within: float = 1e-5,
) -> None:
    """Assert that results are equal up to a fraction of their own norm.

    A tensor among several, such as one of a model's gradients, may also differ by a tenth of that
    fraction of the norm of all: it may be the small difference of large numbers.
    """
    both = _named(found), _named(expected)
    assert both[0].keys() == both[1].keys()
    norms = {name: torch.linalg.vector_norm(x.double()).item() for name, x in both[1].items()}
    of_all = sum(norm**2 for norm in norms.values()) ** 0.5
    for name, x in both[0].items():
        assert x.shape == both[1][name].shape, name
        error = torch.linalg.vector_norm(x.double() - both[1][name].double()).item()
        bound = within * (norms[name] + 0.1 * of_all)
        assert error <= bound, f"{name}: the error is {error:.3g}, above {bound:.3g}"


def _named(tensors: Any) -> dict[Any, Tensor]:
    if isinstance(tensors, Tensor | np.ndarray):
        tensors = [tensors]
    pairs = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    return {name: torch.as_tensor(x).detach() for name, x in pairs}
