"""Which tests a change asks for."""

from __future__ import annotations

import pytest

from tools.changed import asked_for

EVERYTHING = "arm64 compilers documents oldest pages variants"


@pytest.mark.parametrize(
    ("paths", "asked"),
    [
        ([], ""),
        (["src/attnlm/data/prepare.py", "tests/data/test_splits.py"], ""),
        (["src/attnlm/see/pages/chart.js"], "pages"),
        (["docs/learn.md", "src/attnlm/see/trace.py"], "documents pages"),
        (["README.md"], "documents"),
        (["src/attnlm/compute/native/decoding.c"], "arm64 compilers variants"),
        (["src/attnlm/model/layers.py", "tests/training/test_memory.py"], "compilers variants"),
        (["tests/conftest.py"], EVERYTHING),
        ([f"src/attnlm/data/{n}.py" for n in range(61)], EVERYTHING),
        (None, EVERYTHING),
    ],
)  # fmt: skip
def test_a_change_asks_for_the_tests_of_what_it_touches(
    paths: list[str] | None, asked: str
) -> None:
    assert sorted(asked_for(paths)) == asked.split()
