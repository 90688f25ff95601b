"""Skeletons (models without numbers), sizes of models, and checks for finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import NotFiniteError
from attnlm.model.architecture import Architecture
from attnlm.model.language_model import LanguageModel, build_model


def model_skeleton(architecture: Architecture, vocab_size: int) -> LanguageModel:
    """Return the model on torch's meta device: names and shapes without memory and numbers."""
    with torch.device("meta"):
        return empty_model(architecture, vocab_size)


def parameter_shapes(architecture: Architecture, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name.

    Only one block is built: the architecture may come from a file that claims thousands of layers.
    """
    skeleton = model_skeleton(replace(architecture, layers=1), vocab_size)
    return {
        name.replace("blocks.0.", f"blocks.{layer}.", 1): tuple(p.shape)
        for name, p in skeleton.named_parameters()
        for layer in range(architecture.layers if name.startswith("blocks.0.") else 1)
    }


def model_of(
    architecture: Architecture, vocab_size: int, weights: Mapping[str, Tensor]
) -> LanguageModel:
    """Return the model with these weights as its parameters, without copying them."""
    model = empty_model(architecture, vocab_size)
    for name, parameter in model.named_parameters():
        assert parameter.shape == weights[name].shape, name
        parameter.data = weights[name]
    return model


def empty_model(architecture: Architecture, vocab_size: int) -> LanguageModel:
    """Return a model with uninitialised weights, without writing to their memory."""
    with _WithoutInitialisation():
        return build_model(architecture, vocab_size)


class _WithoutInitialisation(TorchFunctionMode):
    """A mode that skips the functions of torch.nn.init. These functions draw random numbers and,
    for a meta tensor, import torch's compiler, which takes 1.5 seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def check_finite(*tensors: Tensor) -> None:
    """Raise NotFiniteError if a model's weights or results contain NaN or infinity."""
    for tensor in tensors:
        # If any number is NaN, so are minimum and maximum. A mask of all numbers would take memory.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise NotFiniteError


def parameters_of(architecture: Architecture, vocab_size: int) -> int:
    """Return the number of parameters of the model; tied parameters count once."""
    return sum(map(math.prod, parameter_shapes(architecture, vocab_size).values()))
