"""Skeletons (models without numbers), sizes of models, and checks of models and numbers."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.model.language_model import LanguageModel
from attnlm.model.spec import ModelSpec, is_ours

_TOLERANCE = 1e-3
"""The largest difference of two results that are equal, as a fraction of the largest number."""
_OURS = ("attnlm", "torch", "builtins", "collections", "contextlib", "functools", "typing")
"""The packages that define what the modules of models use."""
_CHANGEABLE = ("training", "recompute", "generators")
"""Attributes that differ between models of the same settings."""


class ChangedModelError(AttnlmError):
    """Raised when a model computes something else than its settings say."""


def meta_model(spec: ModelSpec, vocab_size: int) -> LanguageModel:
    """Return the model on torch's meta device: names and shapes without memory and numbers."""
    _run_files(spec)
    with torch.device("meta"):
        return uninitialised_model(spec, vocab_size)


def are_close(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two results are equal up to rounding. NaN and infinity differ."""
    return bool((actual - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def is_as_built(model: LanguageModel) -> bool:
    """Return True if a model computes what its settings say.

    Otherwise, a class, function, module or attribute was changed from outside. Code that computes a
    model without calling its modules must not be used then.
    """
    if not is_ours(model.spec):
        return False
    built = meta_model(model.spec, model.vocab_size)
    kinds = {*map(type, model.modules())}
    files = {sys.modules[kind.__module__] for kind in kinds if kind.__module__[:7] == "attnlm."}
    defined = [value for file in files for value in vars(file).values() if callable(value)]
    methods = [vars(kind).get("forward", kind) for kind in kinds]
    are_ours = all(str(d.__module__).partition(".")[0] in _OURS for d in (*defined, *methods))
    return are_ours and _described(model) == _described(built)


def _described(model: LanguageModel) -> list[tuple[str, ...]]:
    """Return each module's place, class, attributes, hooks, and the shapes of its parameters."""
    described: list[tuple[str, ...]] = []
    for path, module in model.named_modules():
        attributes = {
            name: value
            for name, value in vars(module).items()
            if name not in _CHANGEABLE and (name[0] != "_" or name.endswith("_hooks"))
        }
        shapes = [p.shape for p in module.parameters(recurse=False)]
        described.append((path, str(type(module)), str(attributes), str(shapes)))
    return described


def check_textbook(model: LanguageModel, name: str) -> None:
    """Raise ChangedModelError unless the textbook pass computes a model; `name` is the run's.

    Scripts, pages and other tools compute what that pass does.
    """
    if not is_as_built(model):
        raise ChangedModelError(
            f"{name} computes something else than its settings say",
            "use a model of attnlm's own classes, unchanged",
        )


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


def draw_zeros(model: LanguageModel) -> None:
    """Draw the parameters that begin as zeros, such as the LM head: zeros would hide the rest."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.any():
            std = parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 1.0
            drawn = torch.empty(parameter.shape).normal_(std=std, generator=generator)
            parameter.data = drawn.to(parameter.device)  # the user's variable may be its memory


@contextlib.contextmanager
def restoring(model: LanguageModel) -> Iterator[None]:
    """Restore parameters, buffers and Python attributes of a model at the end of the context.

    Lists and dictionaries among the attributes get their elements back, but not what these hold.
    """
    dense = [t for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided]
    tensors = [(tensor, tensor.data, tensor.data.clone()) for tensor in dense]
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = [value for _, before in attributes for value in before.values()]
    containers = [(v, v.copy()) for v in held if type(v) in (dict, list, OrderedDict)]
    try:
        yield
    finally:
        for owned, before in attributes:
            owned.clear()
            owned.update(before)
        for container, content in containers:
            container.clear()
            if isinstance(container, dict):
                container.update(content)
            else:
                container.extend(content)
        for tensor, memory, values in tensors:
            tensor.data = memory
            if not memory.equal(values):
                memory.copy_(values)


def uninitialised_model(spec: ModelSpec, vocab_size: int) -> LanguageModel:
    """Return a model with uninitialised weights, without writing to their memory."""
    _run_files(spec)
    with _WithoutInitialisation():
        return spec.build(vocab_size)


def _run_files(spec: ModelSpec) -> None:
    """Run the files of own code, whose variables need their initialisation."""
    for code in spec.codes.values():
        code.load()


class _WithoutInitialisation(TorchFunctionMode):
    """A mode that skips the functions of torch.nn.init. These functions draw random numbers and,
    for a meta tensor, import torch's compiler, which takes 1.5 seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_init(func):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def initial_distributions(spec: ModelSpec, vocab_size: int) -> dict[str, tuple[str, float]]:
    """Return how each parameter of a new model is drawn, by name, in the model's order.

    "normal" has the standard deviation, "uniform" the limit on both sides of 0, and "constant" the
    value. Nothing is drawn from torch's random state.
    """
    with _RecordedInitialisation() as recorded:
        model = spec.build(vocab_size)
    return {name: recorded.distribution_of(p) for name, p in model.named_parameters()}


class _RecordedInitialisation(TorchFunctionMode):
    """A mode that records what functions of torch.nn.init draw from, and writes NaN instead."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[tuple[Tensor, tuple[str, float]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        distribution = _init_distribution(func.__name__, **kwargs) if _is_init(func) else None
        if distribution is None:
            return func(*args, **kwargs)
        tensor: Tensor = kwargs["tensor"]
        tensor.detach().fill_(math.nan)
        self._drawn.append((tensor, distribution))
        return tensor

    def distribution_of(self, parameter: Tensor) -> tuple[str, float]:
        """Return what a parameter was drawn from last, unless other numbers replaced it."""
        value = parameter.detach().flatten()[0].item()
        if not math.isnan(value):
            return "constant", value
        return [drawn for tensor, drawn in self._drawn if tensor is parameter][-1]


def _is_init(func: Any) -> bool:
    return getattr(func, "__module__", None) == "torch.nn.init"


def _init_distribution(
    function: str, *, tensor: Tensor, **settings: Any
) -> tuple[str, float] | None:
    """Return the distribution of a function of torch.nn.init, or None if it draws nothing."""
    match function:
        case "normal_":
            return "normal", settings["std"]
        case "uniform_":
            return "uniform", settings["b"]
        case "kaiming_uniform_":  # as nn.Linear uses it
            return "uniform", tensor.shape[1] ** -0.5
    return None


def check_finite(*tensors: Tensor) -> None:
    """Raise NotFiniteError if a model's weights or results contain NaN or infinity."""
    for tensor in tensors:
        # If any number is NaN, so are minimum and maximum. A mask of all numbers would take memory.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise NotFiniteError


def parameter_count(spec: ModelSpec, vocab_size: int) -> int:
    """Return the number of parameters of the model; tied parameters count once."""
    return sum(map(math.prod, spec.parameter_shapes(vocab_size).values()))
