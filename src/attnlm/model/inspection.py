"""Skeletons (models without numbers), sizes of models, and checks of models and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.model import textbook
from attnlm.model.language_model import Bigram, LanguageModel, Transformer
from attnlm.model.sizes import weight_shapes
from attnlm.model.spec import ModelSpec

_TOLERANCE = 1e-3
"""The largest difference of two results that are equal, as a fraction of the largest number."""
_COMPARED = 32
"""The most tokens for which a model is compared with the textbook pass."""


class ChangedModelError(AttnlmError):
    """Raised when a model computes something else than its settings say."""


def model_skeleton(spec: ModelSpec, vocab_size: int) -> LanguageModel:
    """Return the model on torch's meta device: names and shapes without memory and numbers."""
    with torch.device("meta"):
        return empty_model(spec, vocab_size)


def has_usual_weights(model: Bigram | Transformer) -> bool:
    """Return True if a model has exactly the parameters that its settings describe.

    It may have others if its classes were replaced. Code that reads the weights itself, instead of
    calling the model, would then read wrong ones.
    """
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return found == weight_shapes(model.architecture, model.vocab_size)


def agree(found: Tensor, expected: Tensor) -> bool:
    """Return True if two results are equal up to rounding. NaN and infinity differ."""
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def check_textbook(model: LanguageModel, name: str) -> None:
    """Raise ChangedModelError unless the textbook pass gives a model's logits for a few tokens.

    Scripts, pages and other tools compute what that pass does. The modules of the model may have
    been changed from outside. `name` is the run's. Logits that are not finite are not compared.
    """
    ids_T = torch.arange(min(_COMPARED, model.block_size)) % model.vocab_size
    if isinstance(model, Bigram | Transformer) and has_usual_weights(model):
        with torch.inference_mode():
            expected_TV = model(ids_T[None])[0]
            found_TV = textbook.forward(model.architecture, model.state_dict(), ids_T)
        if not expected_TV.isfinite().all() or agree(found_TV, expected_TV):
            return
    raise ChangedModelError(
        f"{name} computes something else than its settings say",
        "use a model of attnlm's own classes, unchanged",
    )


def model_of(spec: ModelSpec, vocab_size: int, weights: Mapping[str, Tensor]) -> LanguageModel:
    """Return the model with these weights as its parameters, without copying them."""
    model = empty_model(spec, vocab_size)
    for name, parameter in model.named_parameters():
        assert parameter.shape == weights[name].shape, name
        parameter.data = weights[name]
    for name, buffer in stored_buffers(model).items():
        buffer.copy_(weights[name])
    return model


def stored_buffers(model: LanguageModel) -> dict[str, Tensor]:
    """Return views of the buffers that a checkpoint holds, which own code may change in training.

    Checkpoints hold 32-bit numbers. The bits of wider numbers are several of them. Buffers of
    narrower numbers, such as masks, are not stored: the constructor makes them.
    """
    kept = model.state_dict(keep_vars=True).keys()
    found = {n: b.detach() for n, b in model.named_buffers() if n in kept and b.element_size() > 3}
    return {n: b if b.dtype == torch.float32 else _as_floats(b) for n, b in found.items()}


def _as_floats(buffer: Tensor) -> Tensor:
    if not buffer.is_meta:
        return buffer.view(-1).view(torch.float32)
    return torch.empty(buffer.numel() * buffer.element_size() // 4, device="meta")


def empty_model(spec: ModelSpec, vocab_size: int) -> LanguageModel:
    """Return a model with uninitialised weights, without writing to their memory."""
    with _WithoutInitialisation():
        return spec.build(vocab_size)


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


def parameters_of(spec: ModelSpec, vocab_size: int) -> int:
    """Return the number of parameters of the model; tied parameters count once."""
    return sum(map(math.prod, spec.parameter_shapes(vocab_size).values()))
