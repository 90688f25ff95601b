"""The attention page: one file, nothing from elsewhere, and in a real browser it does its work."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlm.run import open_run
from attnlm.see.attend import CAUTION, Attention, attend
from attnlm.see.attend_page import attention_page
from tests.test_cli import attnlm

TEXT = "the quick fox.\nA"[:15]


@pytest.fixture(name="attention")
def some_attention(trained: Path) -> Attention:
    return attend(open_run("transformer", checkpoint_dir=trained / "checkpoints"), TEXT)


class Elements(HTMLParser):
    """Every element's name and attributes, and the scripts' contents."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)


def elements(html: bytes) -> Elements:
    parser = Elements()
    parser.feed(html.decode())
    return parser


def test_it_is_one_file_that_asks_for_nothing_else(attention: Attention) -> None:
    html = attention_page(attention)
    for _, attributes in elements(html).found:
        assert "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    assert not re.search(r"https?:|url\(|@import", html.decode())
    assert CAUTION in html.decode() and html == attention_page(attention)


def test_its_data_are_the_attention(attention: Attention) -> None:
    data = json.loads(elements(attention_page(attention)).scripts[0])
    triangles = np.frombuffer(base64.b64decode(data["weights"]), np.uint8)
    rows, columns = np.tril_indices(len(TEXT))
    wanted = attention.weights[..., rows, columns].ravel()
    np.testing.assert_allclose(triangles / 255, wanted, atol=0.5 / 255 + 1e-6)
    assert len(data["next"]) == len(TEXT)
    for place, likeliest in enumerate(data["next"]):
        assert likeliest[0][1] == pytest.approx(attention.probabilities[place].max(), abs=1e-4)


def test_a_text_cannot_break_out_of_it(attention: Attention) -> None:
    tokens = ["</script>", "<b>", "&", '"', *attention.tokens[4:]]
    broken = Attention(**{**attention.__dict__, "tokens": tokens})
    found = elements(attention_page(broken))
    names = [name for name, _ in found.found]
    assert names.count("script") == 2 and "b" not in names
    assert json.loads(found.scripts[0])["tokens"][:4] == tokens[:4]


def test_a_large_model_and_a_long_text_stay_below_3_mb() -> None:
    length, vocabulary = 256, [chr(33 + i) for i in range(65)]
    weights = np.full((6, 6, length, length), 1 / length, np.float32)
    probabilities = np.full((length, 65), 1 / 65, np.float32)
    tokens = [vocabulary[i % 65] for i in range(length)]
    large = Attention("run", "transformer", tokens, vocabulary, weights, probabilities)
    assert len(attention_page(large)) < 3_000_000


def test_the_command_writes_it(trained: Path) -> None:
    done = attnlm("attend", TEXT, "--run", "multi-head", "--output", "map.html", cwd=trained)
    assert done.stdout == "map.html\n"
    assert (trained / "map.html").read_bytes().startswith(b"<!doctype html>")


@pytest.fixture(name="browser", scope="module")
def a_browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="there is no playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def shares(view: Any, head: int) -> list[float]:
    script = (
        "n => [...document.querySelectorAll('.head')[n].querySelectorAll('.looked span')]"
        ".map(s => Number(s.style.getPropertyValue('--share')))"
    )
    found: list[float] = view.evaluate(script, head)
    return found


def test_pointing_and_keys_in_a_real_browser(
    browser: Any, attention: Attention, tmp_path: Path
) -> None:
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    context = browser.new_context(offline=True)
    view = context.new_page()
    complaints: list[str] = []
    view.on("console", lambda message: complaints.append(message.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.goto((tmp_path / "map.html").as_uri())

    def shows(place: int) -> None:
        for head, weights_TT in enumerate(attention.weights.reshape(-1, len(TEXT), len(TEXT))):
            np.testing.assert_allclose(shares(view, head), weights_TT[place], atol=0.003)
        token, _ = attention.next_tokens(place)[0]
        shown = {" ": "␣", "\n": "⏎"}.get(token, token)
        assert view.locator("#next .candidate").first.text_content() == shown
        assert view.locator("[aria-pressed=true]").get_attribute("data-place") == str(place)

    shows(len(TEXT) - 1)
    view.hover("[data-place='5']")
    shows(5)
    view.mouse.move(0, 0)
    view.focus("[aria-pressed=true]")
    view.keyboard.press("ArrowRight")
    shows(6)
    view.keyboard.press("Home")
    view.keyboard.press("ArrowLeft")
    shows(0)
    assert complaints == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_paper(
    scheme: str, browser: Any, attention: Attention, tmp_path: Path
) -> None:
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    viewport = {"width": 360, "height": 740}
    context = browser.new_context(color_scheme=scheme, viewport=viewport)
    view = context.new_page()
    view.goto((tmp_path / "map.html").as_uri())
    assert view.evaluate("document.documentElement.scrollWidth") <= 360
    paper, ink = view.evaluate(
        "(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (paper, ink)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
    view.emulate_media(media="print")
    printed = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert printed == "rgb(255, 255, 255)"
    context.close()
