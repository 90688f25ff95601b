"""Checks of models and of numbers, and what trials of a model need."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.model.building import uninitialised_model
from attnlm.model.language_model import LanguageModel
from attnlm.model.spec import is_ours

_TOLERANCE = 1e-3
"""The largest difference of two results that are equal, as a fraction of the largest number."""
_OURS = ("attnlm", "torch", "builtins", "collections", "contextlib", "functools", "typing")
"""The packages that define what the modules of models use."""
_CHANGEABLE = ("training", "generators")
"""Attributes that differ between models of the same settings."""


class ChangedModelError(AttnlmError):
    """Raised when a model computes something else than its settings say."""


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
    built = uninitialised_model(model.spec, model.vocab_size, "meta")
    kinds = {*map(type, model.modules())}
    files = {sys.modules[kind.__module__] for kind in kinds if kind.__module__[:7] == "attnlm."}
    used = [value for file in files for value in vars(file).values() if callable(value)]
    used += [vars(kind).get("forward", kind) for kind in kinds]
    are_ours = all(str(value.__module__).partition(".")[0] in _OURS for value in used)
    return are_ours and _described(model) == _described(built)


def _described(model: LanguageModel) -> list[object]:
    """Return each module's place, class, attributes, hooks, and the shapes of its parameters."""
    described: list[object] = []
    for path, module in model.named_modules():
        described += path, type(module), [p.shape for p in module.parameters(recurse=False)]
        for name, value in vars(module).items():
            if name not in _CHANGEABLE and (name[0] != "_" or name.endswith("_hooks")):
                described += name, str(value)
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


def check_finite(*tensors: Tensor) -> None:
    """Raise NotFiniteError if a model's weights or results contain NaN or infinity."""
    for tensor in tensors:
        # If any number is NaN, so are minimum and maximum. A mask of all numbers would take memory.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise NotFiniteError
