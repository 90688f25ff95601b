"""The arguments of own code: which it has, and their values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from attnlm.base.errors import UsageError
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import Setting, Settings, quoted
from attnlm.base.suggestions import suggestion
from attnlm.model.spec import ModelSpec

PREFIX = "set."
"""The prefix of the arguments of own code among the settings."""
CODE = "code"
"""The setting that records the SHA-256 of each file."""
_PART_SIZES = ("embed_dim", "heads", "block_size", "layer")
_SIZES = {"model": ("vocab_size", "block_size"), "scores": (*_PART_SIZES, "head_size")}
"""The arguments that attnlm gives, by what the code is; those of other parts are _PART_SIZES"""


def code_arguments(code: OwnCode) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of own code by name."""
    return inspect.signature(code.load()).parameters


def defaults_of(code: OwnCode, kind: str) -> dict[str, Setting]:
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


def with_defaults(spec: ModelSpec, chosen: Iterable[str] = ()) -> ModelSpec:
    """Return a description with the value of each argument of its own code, which runs.

    Raises UsageError for arguments that the code does not have or that have wrong values, and for
    `heads` among the settings that the user has `chosen`, if the attention takes none.
    """
    attention = spec.codes.get("attention")
    if attention is not None and "heads" in chosen and "heads" not in code_arguments(attention):
        raise UsageError(
            f"`heads` has no effect: {attention} has no argument heads", "leave `heads` out"
        )
    if not spec.codes:
        return spec
    values = resolved_arguments(spec.codes, spec.arguments)
    return replace(spec, arguments=values)  # type: ignore[type-var]


def resolved_arguments(codes: Mapping[str, OwnCode], given: Settings) -> Settings:
    """Return the value of each argument of own code: the given one, or the default."""
    values: Settings = {}
    for kind, code in codes.items():
        for name, default in defaults_of(code, kind).items():
            values[name] = (
                _in_type_of(default, given[name], name, code) if name in given else default
            )
    for name in given:
        if name not in values:
            named = " and ".join(codes.values())
            hint = suggestion(name, values, f"it has {', '.join(sorted(values)) or 'none'}")
            raise UsageError(f"{named} has no argument {quoted(name)} with a default", hint)
    return values


def _in_type_of(default: Setting, given: Setting, name: str, code: OwnCode) -> Setting:
    """Return the given value of an argument in the type of its default."""
    kind = type(default)
    value = given
    try:
        if isinstance(value, str) and kind is bool:
            value = {"true": True, "false": False}[value.lower()]
        elif kind in (int, float) and type(value) in (int, str):
            value = kind(value)
        if type(value) is not kind or not _is_value(value):
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise UsageError(
            f"invalid value for {name} of {code}: {quoted(given)}",
            f"it must be of type {kind.__name__}, as its default {default!r}",
        ) from None
    return value


def infer_kind(code: OwnCode) -> str:
    """Return what own code seems to be: model, scores or attention."""
    if "vocab_size" in code_arguments(code):
        return "model"
    forward = getattr(code.load(), "forward", None)
    parameters = [] if forward is None else inspect.signature(forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return "scores" if len(needed) > 2 else "attention"  # beside self
