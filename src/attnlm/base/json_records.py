"""Records: dataclasses that are stored in JSON files. Each value is checked when it is read.

A field with `limited(…)` has limits; a field with a default may be missing in a file. A record may
check more in `__post_init__`, which raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.files import COPY_AGAIN, read_json, read_sealed
from attnlm.base.setting_fields import check, hints, quoted, setting

_Record = TypeVar("_Record")


def limited(*, default: Any = MISSING, **limits: Any) -> Any:
    """Return a field. `limits` are arguments of `setting`; for a tuple, they apply to each item."""
    return setting("", default=default, **limits)


def read_record(
    record: type[_Record],
    path: Path,
    *,
    format: int,
    hint: str = COPY_AGAIN,
    sealed: bool = False,
) -> _Record:
    """Return the record in a JSON file of the version `format`, `sealed` by its own hash or not."""
    content = (read_sealed if sealed else read_json)(path)
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
        result: _Record = _decode_record(record, content, "")
        return result
    except (ValueError, UsageError) as error:
        raise AttnlmError(f"{path} is not valid: {error}", hint) from None


def _decode_record(record: Any, content: object, within: str) -> Any:
    if not isinstance(content, dict):
        raise _invalid_value_error(within.rstrip("."), content)
    values = {}
    for field in fields(record):
        if field.name in content:
            hint = hints(record)[field.name]
            values[field.name] = _decode_value(field, hint, content[field.name], within)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"its {within + field.name!r} is missing")
    return record(**values)


def _decode_value(field: Field[Any], hint: Any, value: Any, within: str) -> Any:
    kinds = get_args(hint)
    key = within + field.name
    if NoneType in kinds:
        if value is None:
            return None
        hint = next(kind for kind in kinds if kind is not NoneType)
    origin = get_origin(hint)
    if is_dataclass(hint):
        return _decode_record(hint, value, f"{key}.")
    stored: Any = {tuple: list, Mapping: dict}.get(origin, object)
    if not isinstance(value, stored):
        raise _invalid_value_error(key, value)
    if origin is tuple:
        return tuple(_decode_value(field, get_args(hint)[0], item, within) for item in value)
    if hint is Any or origin is Mapping:
        return value
    try:
        check(hint, field, value)
        return float(value) if hint is float else value
    except (UsageError, OverflowError):
        raise _invalid_value_error(key, value) from None


def _invalid_value_error(key: str, value: object) -> ValueError:
    return ValueError(f"its {key!r} cannot be {quoted(value)}")
