"""The attention page: one file, nothing from elsewhere, and in a real browser it does its work."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlm.runs.open_run import open_run
from attnlm.see.attend import CAUTION, Attention, attend
from attnlm.see.attend_page import attention_page
from attnlm.see.next_tokens import CANDIDATES
from tests.browser import check_fits, opened
from tests.command import attnlm

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
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)
        self.text += data


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
    at_1 = data["next"]["temperatures"].index(1.0)
    assert len(data["next"]["candidates"]) == len(data["next"]["sums"]) == len(TEXT)
    for place, candidates in enumerate(data["next"]["candidates"]):
        likeliest = np.exp([logit for _, logit in candidates]) / data["next"]["sums"][place][at_1]
        wanted = np.sort(attention.probabilities[place])[::-1][:CANDIDATES]
        np.testing.assert_allclose(likeliest, wanted, rtol=1e-3, atol=1e-9)


def test_a_text_cannot_break_out_of_it(attention: Attention) -> None:
    tokens = ["</script>", "<b>", "&", '"', *attention.tokens[4:]]
    broken = Attention(**{**attention.__dict__, "tokens": tokens})
    found = elements(attention_page(broken))
    names = [name for name, _ in found.found]
    assert names.count("script") == 3 and "b" not in names
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
    with opened(browser, tmp_path / "map.html") as view:

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


def test_the_temperature_is_a_slider(browser: Any, attention: Attention, tmp_path: Path) -> None:
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    logs_TV = np.log(attention.probabilities.astype(np.float64))
    with opened(browser, tmp_path / "map.html") as view:
        view.hover("[data-place='4']")
        view.focus("#temperature")
        for temperature, presses in ((1.0, 0), (1.5, 5), (0.5, -10), (0.1, -4), (2.0, 19)):
            for _ in range(abs(presses)):
                view.keyboard.press("ArrowRight" if presses > 0 else "ArrowLeft")
            assert view.locator("#temperature-shown").text_content() == f"{temperature:.1f}"
            weights = np.exp((logs_TV[4] - logs_TV[4].max()) / temperature)
            wanted = np.sort(weights / weights.sum())[::-1][:CANDIDATES]
            shown = [float(x[:-1]) for x in view.locator("#next .percent").all_text_contents()]
            np.testing.assert_allclose(shown[:-1], 100 * wanted, atol=0.06)
            assert shown[-1] == pytest.approx(100 * (1 - wanted.sum()), abs=0.06)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_paper(
    scheme: str, browser: Any, attention: Attention, tmp_path: Path
) -> None:
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    check_fits(browser, tmp_path / "map.html", "attend", scheme)
