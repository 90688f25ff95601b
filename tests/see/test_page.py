"""Scripts of pages: oxlint reads each of them, and pages join them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from attnlm.see import page
from attnlm.see.model_page import play_page
from attnlm.see.train_page import train_page
from tests.see.test_model_page import shown
from tests.see.test_train_page import TEXT

SCRIPTS = sorted(path.name for path in (Path(page.__file__).parent / "pages").glob("*.js"))
ENTRIES = (
    "comparison_page.js",
    "exam_page.js",
    "play_page.js",
    "report_page.js",
    "train_page.js",
    "train_worker.js",
)


def test_pages_run_or_import_each_script_and_nothing_else() -> None:
    assert sorted(page._with_imports(*ENTRIES)) == SCRIPTS


def test_no_text_on_a_page_controls_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = jinja2.DictLoader({"one.html": "<p>{{ name }}</p>{{ data }}"})
    monkeypatch.setattr("jinja2.PackageLoader", lambda *_: templates)
    said = {"said": "\x1b\x9b<é"}
    content = page.render("one.html", script="", data=said, name="a\x1b\x9b\u202e<\nb").decode()
    assert content == '<p>a\\x1b\\x9b\\u202e&lt;\nb</p>{"said":"\\u001b\\u009b\\u003cé"}'


def test_pages_add_one_global_name(open_page: Any) -> None:
    def global_names(content: bytes) -> set[str]:
        return set(open_page(content).evaluate("Object.getOwnPropertyNames(globalThis)"))

    usual = global_names(b"<!doctype html>")
    for content in (play_page([shown("multi-head")]), train_page(TEXT)):
        assert global_names(content) - usual == {"attnlm"}
