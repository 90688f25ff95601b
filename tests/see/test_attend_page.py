"""The attention page: one file, nothing from elsewhere, and in a real browser it does its work."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlm.runs.run import open_run
from attnlm.see.attend import CAUTION, Attention, attend
from attnlm.see.attend_page import CANDIDATES, attention_page, packed_maps
from tests.browser import asks_for_nothing, check_fits, darkness, elements, opened, until
from tests.models import attention_like

TEXT = "the quick fox.\nA"[:15]


@pytest.fixture(name="attention")
def some_attention(trained: Path) -> Attention:
    return attend(open_run("transformer", checkpoint_dir=trained / "checkpoints"), TEXT)


def test_the_page_is_one_file_with_the_attention(attention: Attention) -> None:
    html = attention_page(attention)
    asks_for_nothing(html)
    assert CAUTION in html.decode() and html == attention_page(attention)
    data = json.loads(elements(html).scripts[0])
    assert data["maps"]["least"] == 1 and data["heads"] == 2
    np.testing.assert_allclose(drawn(data["maps"], attention), attention.weights, atol=0.51 / 255)
    at_1 = data["next"]["temperatures"].index(1.0)
    assert len(data["next"]["candidates"]) == len(data["next"]["sums"]) == len(TEXT)
    for place, candidates in enumerate(data["next"]["candidates"]):
        likeliest = np.exp([logit for _, logit in candidates]) / data["next"]["sums"][place][at_1]
        wanted = np.sort(attention.probabilities[place])[::-1][:CANDIDATES]
        np.testing.assert_allclose(likeliest, wanted, rtol=1e-3, atol=1e-9)


def test_texts_are_escaped(attention: Attention) -> None:
    tokens = ["</script>", "<b>", "&", '"', *attention.tokens[4:]]
    broken = Attention(**{**attention.__dict__, "tokens": tokens})
    found, usual = (elements(attention_page(shown)) for shown in (broken, attention))
    assert [name for name, _ in found.found] == [name for name, _ in usual.found]
    assert json.loads(found.scripts[0])["tokens"][:4] == tokens[:4]


def drawn(maps: dict[str, Any], attention: Attention) -> np.ndarray[Any, Any]:
    """Return the maps as a page draws them: stored weights, and the rest of each row uniformly."""
    counts, columns = (
        np.frombuffer(base64.b64decode(maps[key]), "<u2") for key in ("counts", "columns")
    )
    steps = np.frombuffer(base64.b64decode(maps["steps"]), np.uint8)
    length, at, rows = len(attention.tokens), 0, []
    for number, count in enumerate(counts.tolist()):
        place = number % length
        held = steps[at : at + count].astype(float)
        others = place + 1 - count
        each = min(max(0, 255 - held.sum()) / max(1, others), maps["least"] - 0.5)
        row = np.where(np.arange(length) <= place, each, 0.0)
        row[columns[at : at + count]] = held
        rows.append(row / 255)
        at += count
    assert at == len(steps) == len(columns)
    return np.array(rows).reshape(attention.weights.shape)


def test_long_texts_keep_the_largest_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = attention_like(2, 5, 60, 7)
    whole = packed_maps(attention.weights)
    np.testing.assert_allclose(drawn(whole, attention), attention.weights, atol=0.51 / 255)
    monkeypatch.setattr("attnlm.see.attend_page._MOST_WEIGHTS", 3000)
    less = packed_maps(attention.weights)
    assert 2000 < len(base64.b64decode(less["steps"])) <= 3000 < len(whole["steps"]) / 4 * 3
    assert less["least"] > 1
    shown = drawn(less, attention)
    np.testing.assert_allclose(shown, attention.weights, atol=less["least"] / 255)
    uniform = np.tril(np.ones((60, 60))) / np.arange(1, 61)[:, None]
    attention.weights[0, 0] = uniform  # of which little is held, and all is drawn
    shown = drawn(packed_maps(attention.weights), attention)[0, 0, 30:]
    np.testing.assert_allclose(shown, uniform[30:], atol=0.5 / 255)


@pytest.mark.slow
def test_gpt2_with_a_full_context_stays_below_5_mb(browser: Any, tmp_path: Path) -> None:
    page = attention_page(attention_like(12, 12, 1024, 50_257))
    assert len(page) < 5_000_000
    (tmp_path / "map.html").write_bytes(page)
    with opened(browser, tmp_path / "map.html") as view:
        view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
        view.locator("#thumbnails button", has_text="layer 12 head 12").click()
        assert view.inner_text("#head-caption").startswith("Layer 12, head 12")
        assert np.nanmax(darkness(view, "#large canvas")) > 100


@pytest.fixture(name="page")
def a_page(attention: Attention, tmp_path: Path) -> Path:
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    return tmp_path / "map.html"


@pytest.fixture(name="view")
def an_opened_page(browser: Any, page: Path) -> Iterator[Any]:
    with opened(browser, page) as view:
        yield view


def shares(view: Any) -> list[float]:
    """The tints of the text."""
    script = (
        "[...document.querySelectorAll('#text button')]"
        ".map(button => Number(button.style.getPropertyValue('--fraction')))"
    )
    found: list[float] = view.evaluate(script)
    return found


def test_pointing_keys_and_temperature_in_a_real_browser(view: Any, attention: Attention) -> None:
    def shows(place: int) -> None:
        np.testing.assert_allclose(shares(view), attention.weights[0, 0, place], atol=0.003)
        token, _ = attention.next_tokens(place)[0]
        shown = {" ": "␣", "\n": "⏎"}.get(token, token)
        assert view.locator("#next .candidate").first.text_content() == shown
        pressed = view.locator("#text button").evaluate_all(
            "all => all.findIndex((button) => button.ariaPressed === 'true')"
        )
        assert pressed == place
        assert f"token {place + 1} of {len(TEXT)}" in view.inner_text("#chosen")
        for head, most in enumerate(attention.weights.reshape(4, len(TEXT), -1)[:, place]):
            caption = view.locator("#thumbnails small").nth(head).text_content()
            assert abs(float(caption.split("%")[0]) - 100 * most.max()) < 0.75

    view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
    shows(len(TEXT) - 1)
    view.hover("#text button >> nth=5")
    shows(5)
    view.mouse.move(0, 0)
    view.focus("#text [aria-pressed=true]")
    view.keyboard.press("ArrowRight")
    shows(6)
    view.keyboard.press("Home")
    view.keyboard.press("ArrowLeft")
    shows(0)
    box = view.locator("#large .picture").bounding_box()
    at = {"x": box["width"] * 2.5 / len(TEXT), "y": box["height"] * 9.5 / len(TEXT)}
    view.locator("#large .picture").click(position=at)
    shows(9)
    view.keyboard.press("ArrowUp")
    shows(8)
    view.keyboard.press("ArrowLeft")
    assert f"to “{TEXT[1]}”" in view.inner_text("#head-caption")
    view.hover("#large .picture", position=at)
    share = attention.weights[0, 0, 9, 2]
    assert view.inner_text(".tooltip").startswith("“␣” gives ")
    assert abs(float(view.inner_text(".tooltip").split()[2][:-1]) - 100 * share) < 0.75
    view.hover("#text button >> nth=4")
    view.focus("#temperature")
    logs_TV = np.log(attention.probabilities.astype(np.float64))
    for temperature, presses in ((1.0, 0), (1.5, 5), (0.5, -10), (0.1, -4), (2.0, 19)):
        for _ in range(abs(presses)):
            view.keyboard.press("ArrowRight" if presses > 0 else "ArrowLeft")
        assert view.locator("#temperature-shown").text_content() == f"{temperature:.1f}"
        weights = np.exp((logs_TV[4] - logs_TV[4].max()) / temperature)
        wanted = np.sort(weights / weights.sum())[::-1][:CANDIDATES]
        shown = [float(x.strip("< %")) for x in view.locator("#next .percent").all_text_contents()]
        np.testing.assert_allclose(shown[:-1], 100 * wanted, atol=0.51)
        assert shown[-1] == pytest.approx(100 * (1 - wanted.sum()), abs=0.51)


def test_a_head_is_chosen_in_the_grid(view: Any, attention: Attention) -> None:
    past = np.tril_indices(len(TEXT))

    def shows(layer: int, head: int) -> None:
        map_TT = attention.weights[layer, head]
        number = 2 * layer + head
        for canvas in ("#large canvas", f"#thumbnails button >> nth={number} >> canvas"):
            found = darkness(view, canvas)
            assert np.isnan(found[np.triu_indices(len(TEXT), 1)]).all()
            assert np.corrcoef(found[past], np.sqrt(map_TT[past]))[0, 1] > 0.98
        np.testing.assert_allclose(shares(view), map_TT[-1], atol=0.003)
        name = f"Layer {layer + 1}, head {head + 1}: “⏎” attends to"
        assert view.inner_text("#head-caption").startswith(name)
        pressed = view.locator("#thumbnails [aria-pressed=true]")
        assert f"layer {layer + 1} head {head + 1}" in pressed.inner_text()

    view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
    shows(0, 0)
    view.locator("#thumbnails button", has_text="layer 2 head 1").click()
    shows(1, 0)
    for key, place in (
        ("ArrowRight", (1, 1)), ("ArrowUp", (0, 1)), ("ArrowLeft", (0, 0)),
        ("ArrowDown", (1, 0)), ("End", (1, 1)), ("ArrowDown", (1, 1)), ("Home", (0, 0)),
    ):  # fmt: skip
        view.keyboard.press(key)
        shows(*place)


def test_cells_are_blocks_of_a_long_text(browser: Any, tmp_path: Path) -> None:
    attention = attention_like(1, 4, 300, 7)
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    cells = 96
    member = np.eye(cells)[np.arange(300) * cells // 300]
    blocks = member.T @ attention.weights[0, 3] @ member / member.sum(0)[:, None]
    np.testing.assert_allclose(blocks.sum(-1), 1, atol=1e-4)
    past = np.tril_indices(cells)
    with opened(browser, tmp_path / "map.html") as view:
        view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
        found = darkness(view, "#thumbnails button >> nth=3 >> canvas")
        assert np.corrcoef(found[past], np.sqrt(blocks[past]))[0, 1] > 0.95


def test_maps_take_the_colour_of_the_scheme(browser: Any, page: Path) -> None:
    first_pixel = """() => {
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(document.querySelector("#large canvas"), 0, 0);
      return copy.getImageData(0, 0, 1, 1).data.join();
    }"""
    with opened(browser, page, color_scheme="light") as view:
        assert view.evaluate(first_pixel) == "11,47,94,255"
        view.emulate_media(color_scheme="dark")
        # The page redraws with one of its next frames, late on a busy machine.
        until(view, f"({first_pixel})() === '207,230,255,255'")


def test_the_attention_page_fits_phones_and_paper(browser: Any, page: Path) -> None:
    check_fits(browser, page, "attend")
