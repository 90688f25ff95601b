"""Model skeletons without numbers, sizes of models, and checks for finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import NotFiniteError
from attnlm.model.architecture import Architecture
from attnlm.model.language_model import LanguageModel, build_model


def model_skeleton(architecture: Architecture, vocab_size: int) -> LanguageModel:
    """Return the model without memory and numbers: names and shapes, on torch's meta device."""
    with torch.device("meta"), _WithoutInitialisation():
        return build_model(architecture, vocab_size)


def parameter_shapes(architecture: Architecture, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return all names and shapes. One block is made for all layers: a file may claim thousands."""
    skeleton = model_skeleton(replace(architecture, layers=1), vocab_size)
    shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
    return {
        name.replace(_FIRST, f"blocks.{layer}.", 1): shape
        for name, shape in shapes.items()
        for layer in (range(architecture.layers) if name.startswith(_FIRST) else [0])
    }


_FIRST = "blocks.0."


def model_of(
    architecture: Architecture, vocab_size: int, weights: Mapping[str, Tensor]
) -> LanguageModel:
    """Return the model whose parameters are these weights, without a copy."""
    model = empty_model(architecture, vocab_size)
    for name, parameter in model.named_parameters():
        assert parameter.shape == weights[name].shape, name
        parameter.data = weights[name]
    return model


def empty_model(architecture: Architecture, vocab_size: int) -> LanguageModel:
    """Return a model with uninitialised weights, to whose memory nothing is written."""
    with _WithoutInitialisation():
        return build_model(architecture, vocab_size)


class _WithoutInitialisation(TorchFunctionMode):
    """A mode that skips torch.nn.init, which draws random numbers, and imports torch's compiler
    for a meta tensor, which takes 1.5 seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def check_finite(*tensors: Tensor) -> None:
    """Raise NotFiniteError if a model's weights, or numbers computed by it, are NaN or infinite."""
    for tensor in tensors:
        # Minimum and maximum are NaN if any number is. A mask of finite numbers would take memory.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise NotFiniteError


def parameters_of(architecture: Architecture, vocab_size: int) -> int:
    """Return the number of parameters of such a model; tied parameters count once."""
    return sum(map(math.prod, parameter_shapes(architecture, vocab_size).values()))
