"""The texts keep to a budget of habits that make English hard to read (tests/prose.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import DOCUMENTS, SOURCE, places_and_words


# Places per 1,000 words, slightly above what is there. Lower them when the texts get better.
@pytest.mark.parametrize(
    ("paths", "budget"), [(DOCUMENTS, 2.2), (SOURCE, 2.0)], ids=["documents", "docstrings"]
)
def test_texts_keep_to_their_budget(paths: list[Path], budget: float) -> None:
    places, words = places_and_words(paths)
    shown = "\n".join(f"{place.path}:{place.line}: {place.habit}" for place in places)
    assert 1000 * len(places) / words <= budget, f"{shown}\nsee python -m tests.prose"


def test_habits_are_found_outside_of_code_only(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "It is no error.\n\n```text\nit is no error\n```\n\n    it is no error\n\n`is no`\n"
    )
    (tmp_path / "module.py").write_text('"""Of all of it.\n\n    is no\n\nEnd."""\nx = "is no"\n')
    places, words = places_and_words([tmp_path])
    assert {(place.path.name, place.line, place.habit) for place in places} == {
        ("module.py", 1, "docstring fragment"),
        ("module.py", 1, "unnamed thing"),
        ("page.md", 1, "is no"),
    }
    assert words == 10
