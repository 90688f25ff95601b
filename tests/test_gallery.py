"""The pages in docs/gallery: they are what the program writes now, and they compute."""

from __future__ import annotations

from typing import Any

import pytest

from attnlm.see.play import play_page
from docs.gallery import FOLDER, PAGES, data_of
from tests.browser import opened


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_program_writes_of_its_model(name: str) -> None:
    page = FOLDER / f"{name}.html"
    data = data_of(page)
    assert page.read_bytes() == play_page(**data), "run `python docs/gallery.py --render`"
    assert page.stat().st_size < 600_000
    assert data["models"][0]["architecture"]["model"] == PAGES[name]["model"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_continues_a_text(name: str, browser: Any) -> None:
    with opened(browser, FOLDER / f"{name}.html") as view:
        assert view.input_value("#prompt")
        view.locator("#models li").first.wait_for()
        made = view.evaluate(
            "attnlm.models[0].generate({ids: [0], tokens: 50, seed: 1})"
            ".then((ids) => attnlm.models[0].decode(ids))"
        )
        assert len(made) == 50


def test_the_answer_about_sure_and_unsure_places_in_the_lesson_holds(browser: Any) -> None:
    """The page has the four heads that docs/teach.md trains."""
    script = """(text) => {
      const [model] = attnlm.models, logits_V = model.logits(model.encode(text));
      return Math.max(...nextProbabilities(logits_V));
    }"""
    with opened(browser, FOLDER / "multi-head.html") as view:
        sure, unsure = (view.evaluate(script, text) for text in ("the bridg", "the "))
    assert (round(100 * sure), round(100 * unsure)) == (98, 16)
