"""The formats that runs are exported to, and the result of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnlm.base.errors import UsageError
from attnlm.base.suggestions import suggestion

FORMATS = ("hf", "html")
"""The formats that runs are exported to."""
PAGE_TYPES = ("f32", "f16")
"""The number types of a page; the format hf is always float32."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    form: str
    """a class of `transformers`, or "a page of" and its file size"""
    checkpoint: str
    """best or last; for a page with several runs, the values that occur, separated by commas"""


def check_format(to: str, type: str | None) -> None:
    """Raise UsageError if `to` is not a format, or if that format lacks the number type `type`."""
    for name, value, choices in (("to", to, FORMATS), ("type", type, PAGE_TYPES)):
        if value is not None and value not in choices:
            hint = suggestion(value, choices, f"choose from {', '.join(choices)}")
            raise UsageError(f"invalid value for `{name}`: {value!r}", hint)
    if type is not None and to == "hf":
        raise UsageError(
            "`type` applies only to `to` html", "leave `type` out: hf always has float32"
        )
