"""The arguments of own code: which it has, their values, and the module that a call returns."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import Setting, Settings, quoted
from attnlm.base.suggestions import suggestion

_PART_SIZES = ("embed_dim", "heads", "block_size", "layer")
_SIZES = {"model": ("vocab_size", "block_size"), "scores": (*_PART_SIZES, "head_size")}
"""The arguments that attnlm gives, by what the code is; those of other parts are _PART_SIZES"""


def code_arguments(code: OwnCode) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of own code by name."""
    return inspect.signature(code.load()).parameters


def settings_of(code: OwnCode, kind: str) -> dict[str, Setting]:
    """Return the arguments of own code that are settings, with their defaults."""
    sizes = _SIZES.get(kind, _PART_SIZES)
    return {
        name: parameter.default
        for name, parameter in code_arguments(code).items()
        if name not in sizes and _is_value(parameter.default)
    }


def _is_value(value: object) -> bool:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, bool | int | float | str) and is_finite


def check_argument(name: str, value: object) -> None:
    """Check a value for an argument of own code, without the code. Raises UsageError."""
    if not (name.isidentifier() and _is_value(value)):
        raise UsageError(
            f"invalid value for the argument {quoted(name)}: {quoted(value)}",
            "it must be a text, a finite number, true or false",
        )


def build_module(code: OwnCode, sizes: Mapping[str, Any], arguments: Settings) -> Any:
    """Call own code with those of `sizes` and `arguments` that it names, and return its module.

    Raises UsageError for an argument that attnlm does not give, and AttnlmError if the code does
    not return a module.
    """
    import torch
    from torch import nn

    called = code.check_call(arguments)
    parameters = code_arguments(code)
    for name, parameter in parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable and name not in sizes:
            raise UsageError(
                f"{code} needs the argument {name}, which attnlm does not give",
                f"give it a default, or use some of {', '.join(sizes)}",
            )
    values = {**arguments, **sizes}
    with contextlib.redirect_stdout(sys.stderr):  # results alone go to stdout
        module = called(**{name: values[name] for name in parameters if name in values})
    if not isinstance(module, nn.Module):
        raise AttnlmError(
            f"{code} returns {type(module).__name__}, not a module", "return a torch.nn.Module"
        )
    owner = object()  # of parameters: other runs would train those that several modules share
    for name, tensor in module.named_parameters():
        if tensor.dtype != torch.float32:
            raise AttnlmError(
                f"{code}: the parameter {name} is of type {tensor.dtype}",
                "make it torch.float32; use a buffer for what is not trained",
            )
        if vars(tensor).setdefault("attnlm_owner", owner) is not owner:
            raise AttnlmError(
                f"{code}: the parameter {name} exists before the module, and others share it",
                "make it in the constructor",
            )
    for name, buffer in module.named_buffers():
        first = vars(buffer).setdefault("attnlm_first", None)
        if first is None:
            vars(buffer)["attnlm_first"] = buffer.detach().clone()
        elif not torch.equal(first, buffer):
            raise AttnlmError(
                f"{code}: the buffer {name} exists before the module, and another one changed it",
                "make it in the constructor",
            )
    return module


def check_forward(code: OwnCode, kind: str, module: Any) -> None:
    """Raise UsageError if a part can't be called with what parts of its kind get."""
    inputs = ("query", "key") if kind == "scores" else ("x",)
    try:
        inspect.signature(module.forward).bind(*inputs)
    except TypeError as error:
        raise UsageError(
            f"{code} does not fit `{kind}`: forward({', '.join(inputs)}): {error}",
            "`scores` get query and key, `attention` and `mlp` get x: choose among them",
        ) from None


def check_names(arguments: Settings, known: set[str], codes: Mapping[str, OwnCode]) -> None:
    """Raise UsageError for an argument that is not `known`."""
    for name in arguments:
        if name not in known:
            named = " and ".join(codes.values())
            hint = suggestion(name, known, f"it has {', '.join(sorted(known)) or 'none'}")
            raise UsageError(f"{named} has no argument {quoted(name)} with a default", hint)


def resolve_arguments(code: OwnCode, defaults: Settings, arguments: Settings) -> Settings:
    """Return the value of each argument: the given one, or the default, in the default's type."""
    values = dict(defaults)
    for name in defaults.keys() & arguments.keys():
        kind = type(defaults[name])
        value = arguments[name]
        try:
            if isinstance(value, str) and kind in (int, float):
                value = kind(value)
            elif isinstance(value, str) and kind is bool:
                value = {"true": True, "false": False}[value.lower()]
            elif kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind or not _is_value(value):
                raise ValueError
        except (ValueError, KeyError, OverflowError):
            raise UsageError(
                f"invalid value for {name} of {code}: {quoted(arguments[name])}",
                f"it must be of type {kind.__name__}, as its default {defaults[name]!r}",
            ) from None
        values[name] = value
    return values


def infer_kind(code: OwnCode) -> str:
    """Return what own code seems to be: model, scores or attention."""
    if "vocab_size" in code_arguments(code):
        return "model"
    forward = getattr(code.load(), "forward", None)
    parameters = [] if forward is None else inspect.signature(forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return "scores" if len(needed) > 2 else "attention"  # beside self
