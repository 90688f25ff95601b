"""Models built without drawing weights: with given ones, or with shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlm.model.language_model import LanguageModel
from attnlm.model.spec import ModelSpec


def uninitialised_model(spec: ModelSpec, vocab_size: int, device: str = "cpu") -> LanguageModel:
    """Return a model with uninitialised weights, without writing to their memory.

    On the device `meta`, it has names and shapes, but neither memory nor numbers.
    """
    for code in spec.codes.values():
        code.load()  # the variables of a file need their initialisation
    with torch.device(device), _WithoutDraws():
        return spec.build(vocab_size)


class _WithoutDraws(TorchFunctionMode):
    """A mode that notes what functions of torch.nn.init would draw, and skips them. For a meta
    tensor, these functions import torch's compiler, which takes 1.5 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[int, tuple[str, dict[str, Any]]] = {}
        """the last function's name and arguments, by the `id` of a tensor"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            self.skipped[id(tensor)] = func.__name__, kwargs
            return tensor
        if func is Tensor.zero_:  # by nn.init.zeros_
            self.skipped.pop(id(args[0]), None)
        return func(*args, **kwargs)


def build_with_weights(
    spec: ModelSpec, vocab_size: int, weights: Mapping[str, Tensor | NDArray[Any]]
) -> LanguageModel:
    """Return the model with these weights as its parameters, without copying them."""
    model = uninitialised_model(spec, vocab_size)
    for name, parameter in model.named_parameters():
        assert parameter.shape == weights[name].shape, name
        parameter.data = torch.as_tensor(weights[name])
    load_buffers(model, weights)
    return model


def stored_buffers(model: LanguageModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, which own code may change in training.

    Complex numbers are stored as pairs of real numbers. The tensors are copies.
    """
    return {
        name: (torch.view_as_real(b.resolve_conj()) if b.is_complex() else b).detach().clone()
        for name, b in _persistent_buffers(model).items()
    }


def _persistent_buffers(model: LanguageModel) -> dict[str, Tensor]:
    names = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


@torch.no_grad()
def load_buffers(model: LanguageModel, stored: Mapping[str, Tensor | NDArray[Any]]) -> None:
    """Set the buffers to what `stored_buffers` returned, in place: others may share them."""
    for name, buffer in _persistent_buffers(model).items():
        values = torch.as_tensor(stored[name])
        if buffer.is_complex():
            values = torch.view_as_complex(values)
        if 0 in buffer.stride():  # expanded: many elements have one place in memory
            buffer.set_(values.to(buffer.device))  # type: ignore[call-overload]
        else:
            buffer.copy_(values)


def initial_distributions(spec: ModelSpec, vocab_size: int) -> dict[str, tuple[str, float]]:
    """Return how each parameter of a new model is drawn, by name, in the model's order.

    "normal" has the standard deviation, "uniform" the limit on both sides of 0, and "constant" the
    value.
    """
    with _WithoutDraws() as mode:
        model = spec.build(vocab_size)

    def distribution(parameter: Tensor) -> tuple[str, float]:
        match mode.skipped.get(id(parameter)):
            case "normal_", drawn:
                return "normal", drawn["std"]
            case "uniform_", drawn:
                return "uniform", drawn["b"]
            case "kaiming_uniform_", _:  # as nn.Linear uses it
                return "uniform", parameter.shape[-1] ** -0.5
            case None:
                return "constant", parameter.flatten()[0].item()
        raise ValueError("torch.nn.init draws a parameter in a way that is not known here")

    return {name: distribution(p) for name, p in model.named_parameters()}
