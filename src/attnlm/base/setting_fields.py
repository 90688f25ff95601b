"""Settings: dataclass fields that have a line of help, choices and limits."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any, get_type_hints

from attnlm.base.errors import UsageError
from attnlm.base.suggestions import suggestion

Setting = bool | int | float | str
Settings = dict[str, Setting]


def setting(
    help: str,
    *,
    default: Any = None,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    matches: str | None = None,
) -> Any:
    """Return a dataclass field for a setting. `matches` is a regex that the whole value matches."""
    limits: dict[str, Any] = {"at least": at_least, "above": above, "at most": at_most}
    limits |= {"below": below, "of the form": matches}
    known = {words: limit for words, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"help": help, "choices": choices, "limits": known})


@functools.cache
def fields_of(record: type) -> Mapping[str, Field[Any]]:
    """Return the fields of a record, by name."""
    return {described.name: described for described in fields(record)}


hints = functools.cache(get_type_hints)  # the types of all fields of a record


@functools.cache
def type_of(record: type, name: str) -> type:
    """Return the type of the setting `name`, apart from None: bool, int, float or str."""
    hint = hints(record)[name]
    return next(kind for kind in (bool, int, float, str) if hint in (kind, kind | None))


def help_of(record: type, name: str) -> str:
    """Return the line that explains a setting in `--help` and in documents, with its choices."""
    described = fields_of(record)[name].metadata
    choices = described["choices"]
    return f"{described['help']}: {'|'.join(choices)}" if choices else str(described["help"])


def describe_settings(records: Mapping[str, type], *, with_defaults: bool = False) -> str:
    """Return settings with type, limits and help, for a docstring. `records` has their records."""
    lines = []
    for name, record in records.items():
        field = fields_of(record)[name]
        help = help_of(record, name)
        constraints = [type_of(record, name).__name__]
        constraints += [f"{words} {limit}" for words, limit in field.metadata["limits"].items()]
        if with_defaults and "default:" not in help:
            constraints.append(f"default {field.default}")
        lines += [f"{name} : {', '.join(constraints)}", f"    {help}"]
    return "\n".join(lines)


def differing_names(wanted: Mapping[str, object], recorded: Mapping[str, object]) -> list[str]:
    """Return the names in `wanted` whose values are missing in `recorded`, or differ there."""
    return [name for name, value in wanted.items() if recorded.get(name) != value]


def check_value(record: type, name: str, value: object) -> None:
    """Raise UsageError unless `value` has the type of the field `name` and is within its limits."""
    check(type_of(record, name), fields_of(record)[name], value)


def check(kind: type, described: Field[Any], value: object) -> None:
    """Raise UsageError unless `value` is of type `kind` and within the limits of the field."""
    name = described.name
    limits = described.metadata.get("limits", {})
    fits = type(value) is kind
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        # An integer in a recipe may be too large for a float.
        fits = isinstance(value, int) or math.isfinite(value)
        fits = fits or (value == math.inf == limits.get("at most"))
    if not fits:
        message = f"invalid value for `{name}`: {quoted(value)}"
        raise UsageError(message, f"it must be {_EXPECTED[kind]}")
    choices = described.metadata.get("choices")
    if choices and value not in choices:
        hint = suggestion(str(value), choices, f"choose from {', '.join(choices)}")
        raise UsageError(f"invalid value for `{name}`: {quoted(value)}", hint)
    for words, limit in limits.items():
        if not _HOLDS[words](value, limit):
            must = " and ".join(f"{words} {limit}" for words, limit in limits.items())
            raise UsageError(f"invalid value for `{name}`: {quoted(value)}", f"it must be {must}")


_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_HOLDS: dict[str, Callable[[Any, Any], object]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
    "of the form": lambda value, form: re.fullmatch(form, value),
}


def quoted(value: object) -> str:
    """Return a value for a message: its `repr`, shortened."""
    text = repr(value)
    return text if len(text) < 50 else f"{text[:47]}…"
