"""Records: dataclasses whose fields have a line of help, choices and limits.

Values are checked alike wherever they come from: options, Python, a recipe, or a JSON file, which
`read_record` reads. A field with a default may be missing in a file. A record may check more in
`__post_init__`, which raises ValueError.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import COPY_AGAIN, read_json
from attnlm.base.suggestions import suggestion

Setting = bool | int | float | str
Settings = dict[str, Setting]
_Record = TypeVar("_Record")


def setting(
    help: str, *, default: Any = None, choices: tuple[str, ...] | None = None, **limits: Any
) -> Any:
    """Return a dataclass field for a setting.

    `limits` are at_least, above, at_most, below, and matches, a regex for the whole value. For a
    tuple, choices and limits apply to each item.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "limits": limits})


def limited(*, default: Any = MISSING, **limits: Any) -> Any:
    """Return a field of a file. `limits` are arguments of `setting`."""
    return setting("", default=default, **limits)


@functools.cache
def fields_of(record: type) -> Mapping[str, Field[Any]]:
    """Return the fields of a record, by name."""
    return {described.name: described for described in fields(record)}


def settings_of(*records: type) -> dict[str, type]:
    """Return the record of each setting of some records by its name: of each field with help."""
    return {name: r for r in records for name, field in fields_of(r).items() if field.metadata}


_hints = functools.cache(get_type_hints)  # the types of all fields of a record


def type_of(record: type, name: str) -> Any:
    """Return the type of a field, apart from None."""
    hint = _hints(record)[name]
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) else hint


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
        constraints = [type_of(record, name).__name__, *_in_words(field.metadata["limits"])]
        if with_defaults and "default:" not in help:
            constraints.append(f"default {field.default}")
        lines += [f"{name} : {', '.join(constraints)}", f"    {help}"]
    return "\n".join(lines)


def _in_words(limits: Mapping[str, Any]) -> list[str]:
    return [f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items()]


def differing_names(wanted: Mapping[str, object], recorded: Mapping[str, object]) -> list[str]:
    """Return the names in `wanted` whose values are missing in `recorded`, or differ there."""
    return [name for name, value in wanted.items() if recorded.get(name) != value]


def check_value(record: type, name: str, value: object) -> None:
    """Raise UsageError unless `value` has the type of the field `name` and is within its limits."""
    if hint := _problem(type_of(record, name), fields_of(record)[name], value):
        raise UsageError(f"invalid value for `{name}`: {quoted(value)}", hint)


def _problem(kind: type, described: Field[Any], value: Any) -> str | None:
    """Return what the value of a field must be instead, or None if it has `kind` and limits."""
    limits = described.metadata.get("limits", {})
    fits = type(value) is kind
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        # An integer may be too large for a float.
        fits = abs(value) <= sys.float_info.max or value == math.inf == limits.get("at_most")
    if not fits:
        return f"it must be {_EXPECTED[kind]}"
    choices = described.metadata.get("choices")
    if choices and value not in choices:
        return suggestion(value, choices, f"choose from {', '.join(choices)}")
    if all(_HOLDS[name](value, limit) for name, limit in limits.items()):
        return None
    return f"it must be {' and '.join(_in_words(limits))}"


_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_HOLDS: dict[str, Callable[[Any, Any], object]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
    "matches": lambda value, form: re.fullmatch(form, value),
}


def quoted(value: object) -> str:
    """Return a value for a message: its `repr`, shortened."""
    text = repr(value)
    return text if len(text) < 50 else f"{text[:47]}…"


# --- Records in JSON files ------------------------------------------------------------------------


def read_record(
    record: type[_Record],
    path: Path,
    *,
    format: int,
    hint: str = COPY_AGAIN,
    sealed: bool = False,
) -> _Record:
    """Return the record in a JSON file of the version `format`, `sealed` by its own hash or not."""
    content = read_json(path, sealed=sealed)
    if content.pop("format", None) != format:
        raise AttnlmError(
            f"{path} was written by another version of attnlm", f"use that version, or {hint}"
        )
    return record_from_json(record, content, path, hint)


def record_from_json(
    record: type[_Record], content: object, path: Path, hint: str = COPY_AGAIN
) -> _Record:
    """Return the record that a JSON value holds, ignoring keys that the record does not have.

    Fields are of type bool, int, float, str, Any, Mapping, a tuple of one type or another record;
    each may also allow None. Raises AttnlmError, which names the file and the key.
    """
    try:
        return _decode_record(record, content, "")  # type: ignore[no-any-return]
    except ValueError as error:
        raise AttnlmError(f"{path} is not valid: {error}", hint) from None


def _decode_record(record: Any, content: object, key: str) -> Any:
    if not isinstance(content, dict):
        raise _invalid_value_error(key, content)
    values = {}
    for name, described in fields_of(record).items():
        path = f"{key}.{name}" if key else name
        if name in content:
            values[name] = _decode_value(described, _hints(record)[name], content[name], path)
        elif described.default is MISSING and described.default_factory is MISSING:
            raise ValueError(f"its {path!r} is missing")
    return record(**values)


def _decode_value(described: Field[Any], kind: Any, value: Any, key: str) -> Any:
    if NoneType in get_args(kind):
        if value is None:
            return None
        kind = get_args(kind)[0]
    if is_dataclass(kind):
        return _decode_record(kind, value, key)
    origin = get_origin(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode_value(described, get_args(kind)[0], item, key) for item in value)
    if kind is Any or (origin is Mapping and isinstance(value, dict)):
        return value
    if kind not in _EXPECTED or _problem(kind, described, value):
        raise _invalid_value_error(key, value)
    return float(value) if kind is float else value


def _invalid_value_error(key: str, value: object) -> ValueError:
    return ValueError(f"its {key!r} cannot be {quoted(value)}")
