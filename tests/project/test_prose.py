"""The texts keep to a budget of habits that make English hard to read (tests/prose.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import DOCUMENTS, NAMES, PAGES, SOURCE, TESTS, TEXTS, places_and_words


# Places per 1,000 words, slightly above the present numbers. Lower them when the texts get better.
@pytest.mark.parametrize(
    ("paths", "kinds", "budget"),
    [
        (DOCUMENTS, TEXTS, 1.9),
        (SOURCE, TEXTS, 2.2),
        (PAGES, TEXTS, 2.0),
        (TESTS, TEXTS, 3.0),
        (SOURCE, NAMES, 2.7),
        (TESTS, NAMES, 1.7),
    ],
    ids=["documents", "source", "JavaScript", "tests", "names", "names of tests"],
)
def test_texts_keep_to_their_budget(
    paths: list[Path], kinds: tuple[str, ...], budget: float
) -> None:
    places, words = places_and_words(paths, kinds)
    shown = "\n".join(f"{place.path}:{place.line}: {place.habit}" for place in places)
    assert 1000 * len(places) / words <= budget, f"{shown}\nsee python -m tests.prose"


FILES = {
    "page.md": (
        "It is no error.\n\n```text\nit is no error\n```\n\n    it is no error\n\n`is no`\n",
        [(1, "is no")],
    ),
    "module.py": (
        '"""Of all of it.\n\n    is no\n\nEnd."""\nx = "is no"  # is no error\nis_no_error = 1\n',
        [(1, "docstring fragment"), (1, "unnamed thing"), (6, "is no"), (7, "is no")],
    ),
    "test_module.py": ("\ndef test_what_it_is() -> None: ...\n", [(2, "test name fragment")]),
    "kernel.c": (
        "/* one\n   is no */\nint total_of_them(void);\n",
        [(1, "is no"), (3, "unnamed thing")],
    ),
    "page.js": (
        "// is no error\nconst sumOfThem = 'is no';\n",
        [(1, "is no"), (2, "unnamed thing")],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_habits_are_found_outside_of_code_and_in_identifiers(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    (tmp_path / name).write_text(content)
    places, words = places_and_words([tmp_path], (*TEXTS, *NAMES))
    assert sorted((place.line, place.habit) for place in places) == expected
    assert words > 0
