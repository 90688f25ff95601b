"""Records of JSON: what fits is read, anything else is refused by the name of its file and key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnlm.base.errors import AttnlmError
from attnlm.base.files import write_json
from attnlm.base.setting_fields import limited, read_record, record_from_json


@dataclass(frozen=True, kw_only=True)
class Part:
    """A record within a record."""

    count: int = limited(at_least=1, at_most=9)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A record with a field of every type."""

    name: str = limited(matches="[a-z]+")
    kind: str = limited(default="plain", choices=("plain", "other"))
    loss: float
    best: float = limited(default=1.0, at_most=math.inf)
    floor: float | None = None
    is_on: bool = False
    part: Part | None = None
    parts: tuple[str, ...] = ()
    anything: Any = None
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.loss < (self.floor or 0):
            raise ValueError("its loss is below the floor")


CONTENT: dict[str, Any] = {"name": "a", "loss": 2, "settings": {"x": [1]}}
FITTING: dict[str, Any] = {
    "best": math.inf,
    "floor": 1.5,
    "is_on": True,
    "part": {"count": 3, "unknown": 4},
    "parts": ["x", "y"],
    "anything": [None],
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"name": 3}, "its 'name' cannot be 3"),
    "another form": ({"name": "A"}, "its 'name' cannot be 'A'"),
    "no choice": ({"kind": "x"}, "its 'kind' cannot be 'x'"),
    "a truth for a number": ({"loss": True}, "its 'loss' cannot be True"),
    "an infinite number": ({"loss": math.inf}, "its 'loss' cannot be inf"),
    "no number": ({"best": math.nan}, "its 'best' cannot be nan"),
    "nothing": ({"loss": None}, "its 'loss' cannot be None"),
    "out of range": ({"part": {"count": 10}}, "its 'part.count' cannot be 10"),
    "a missing key": ({"part": {}}, "its 'part.count' is missing"),
    "no object": ({"part": [3]}, "its 'part' cannot be [3]"),
    "no list": ({"parts": "x"}, "its 'parts' cannot be 'x'"),
    "a wrong item": ({"parts": ["x", 3]}, "its 'parts' cannot be 3"),
    "no mapping": ({"settings": 3}, "its 'settings' cannot be 3"),
    "a check of its own": ({"floor": 3.0}, "its loss is below the floor"),
}


def test_values_become_fields() -> None:
    least = record_from_json(Whole, CONTENT, Path("x.json"))
    assert least == Whole(name="a", loss=2.0, settings={"x": [1]}) and type(least.loss) is float
    most = record_from_json(Whole, CONTENT | FITTING, Path("x.json"))
    assert (most.part, most.parts, most.best) == (Part(count=3), ("x", "y"), math.inf)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_file_and_key(name: str) -> None:
    changed, reason = WRONG[name]
    with pytest.raises(AttnlmError) as caught:
        record_from_json(Whole, CONTENT | changed, Path("x.json"), "make it again")
    assert caught.value.message == f"x.json is not valid: {reason}"
    assert caught.value.hint == "make it again"


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"format": 2, **CONTENT})
    assert read_record(Whole, path, format=2).name == "a"
    with pytest.raises(AttnlmError, match="was written by another version"):
        read_record(Whole, path, format=1)
