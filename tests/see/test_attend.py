"""Attention in words, colours, numbers and pictures, and as a page in a real browser."""

from __future__ import annotations

import base64
import io
import itertools
import json
import shlex
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from rich.console import Console

from attnlm import Attention, attend, load_model, open_run
from attnlm.model.recorder import record
from attnlm.see import pictures
from attnlm.see.attend import CAUTION, in_colour
from attnlm.see.attend_page import CANDIDATES, attention_page, packed_maps
from attnlm.see.shown_tokens import tint, visible
from tests.browser import asks_for_nothing, check_fits, darkness, elements, until
from tests.kit import command, on_a_terminal, run_in_new_process
from tests.models import attention_like

TEXT = "the quick fox.\nA"[:15]


@pytest.fixture(name="attention")
def some_attention(trained: Path) -> Attention:
    return attend(open_run("transformer", checkpoint_dir=trained / "checkpoints"), TEXT)


def test_attend_equals_the_model(trained: Path) -> None:
    done = command("attend", TEXT, "transformer", "--json", cwd=trained)
    facts = json.loads(done.stdout)
    run = open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model, _ = load_model(run, checkpoint="best", device="cpu")
    seen = record(model, torch.tensor([run.tokenizer.encode(TEXT)]))
    np.testing.assert_allclose(facts["weights"], seen.maps[:, 0], atol=1e-5)
    assert "".join(facts["tokens"]) == TEXT
    likeliest = torch.softmax(seen.logits[0, -1], -1).sort(descending=True).values[:10]
    found = [candidate["probability"] for candidate in facts["next"]]
    np.testing.assert_allclose(found, likeliest, atol=1e-5)
    assert "not an explanation" in done.stderr


def test_words_without_a_terminal_and_blocks_of_colour_on_one(trained: Path) -> None:
    shown = command("attend", TEXT, "average", cwd=trained).stdout
    lines = shown.splitlines()
    assert lines[0] == "layer 1 head 1"
    assert lines[1].split() == ["0", "t", "t@0", "1.00"]
    assert lines[3].split() == ["2", "e", "t@0", "0.33", "h@1", "0.33", "e@2", "0.33"]
    assert lines[1 + len(TEXT)] == "next token" and "\x1b" not in shown
    assert "\x1b[" in on_a_terminal("attend", "the", "average", cwd=trained)
    plain = on_a_terminal("attend", "the", "average", cwd=trained, NO_COLOR="1")
    assert "\x1b" not in plain and "t@0 0.33" in plain


def test_a_square_per_head_and_one_line_where_that_is_too_wide(trained: Path) -> None:
    attention = attend(open_run("multi-head", checkpoint_dir=trained / "checkpoints"), "the")
    (layer,) = in_colour(attention, 80)
    squares: list[Any] = list(layer.renderables)
    for head, square in enumerate(squares):
        title = f"layer 1 head {head + 1}"
        assert square.plain.splitlines() == [title, "t  t ", "h  t h ", "e  t h e "]
        past = attention.weights[0, head][np.tril_indices(3)].tolist()
        assert [span.style for span in square.spans] == [tint(weight) for weight in past]
    shown = io.StringIO()
    Console(file=shown, width=32).print(layer)
    rows = ["t t", "h t h", "e t h e"]
    assert [" ".join(line.split()) for line in shown.getvalue().splitlines()[1:4]] == [
        f"{row} {row}" for row in rows
    ]
    (narrow,) = in_colour(attention, 8)
    squares = list(narrow.renderables)
    assert [square.plain for square in squares] == [
        f"layer 1 head {head}, the last token\ne  t h e \n" for head in (1, 2)
    ]


def test_long_texts_are_cut_to_their_last_tokens_with_a_note(trained: Path) -> None:
    run = open_run("multi-head", checkpoint_dir=trained / "checkpoints")
    notes: list[object] = []
    fitting = (TEXT * 40)[-16:]
    attention = attend(run, TEXT * 40, on_event=notes.append)
    assert "".join(attention.tokens) == fitting
    np.testing.assert_array_equal(attention.weights, attend(run, fitting).weights)
    (note,) = notes
    assert "the last 16" in str(note)


def test_invisible_characters_are_shown() -> None:
    assert visible("a b\n\x00é日\u200b") == "a␣b⏎\\x00é日\\u200b"


ATTEND = "attend 'the dog' transformer"
PATCH = "patch 'the lazy dog' 'the lazy fox' tied --answers t x"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        *itertools.product([ATTEND], ("png", "svg", "html")),
        *itertools.product([PATCH], ("svg", "html")),
        ("heads tied --windows 3", "png"),
        ("heads tied --over-training", "html"),
    ],
)
def test_a_picture_of_each_kind_is_the_same_each_time(
    words: str, kind: str, trained: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"map.{kind.upper()}"
    done = command(*shlex.split(words), "-o", path, "--json", cwd=trained)
    assert json.loads(done.stdout)["output"] == str(path)
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype"}[kind])
    if kind == "svg":
        assert xml.etree.ElementTree.fromstring(content).tag.endswith("svg")
    command(*shlex.split(words), "-o", path, cwd=trained)
    assert path.read_bytes() == content


def test_drawing_is_silent_without_a_home_and_with_user_settings(
    trained: Path, tmp_path: Path
) -> None:
    folder = ("multi-head", "--checkpoint-dir", str(trained / "checkpoints"))
    words = ("attend", "the dog", *folder, "--output")
    unusual: dict[Any, str] = {"image.origin": "lower", "axes.facecolor": "red"}
    command("report", *folder, "--output", "usual.html", cwd=tmp_path)
    command(*words, "usual.png", cwd=tmp_path)
    with matplotlib.rc_context(unusual):
        command("report", *folder, "--output", "theirs.html", cwd=tmp_path)
    settings = "".join(f"{name}: {value}\n" for name, value in unusual.items())
    (tmp_path / "matplotlibrc").write_text(f"{settings}no such line\n")
    homes = ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    env = {**dict.fromkeys(homes, "/dev/null/home"), "DISPLAY": None, "MPLBACKEND": None}
    done = run_in_new_process([*words, "theirs.png"], tmp_path, env=env)
    assert done.code == 0 and "matplotlib" not in done.stderr.lower()
    for kind in ("png", "html"):
        usual, theirs = (tmp_path / f"{name}.{kind}" for name in ("usual", "theirs"))
        assert usual.read_bytes() == theirs.read_bytes()


def test_a_picture_takes_an_installed_font_that_has_the_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody_has, one_has = "\U00010600", "\U00010601"  # Linear A

    def characters(path: str) -> frozenset[int]:
        installed = real(path) - {ord(nobody_has), ord(one_has)}
        return installed | {ord(one_has)} if "cmr10" in path else installed

    real = pictures._characters
    monkeypatch.setattr(pictures, "_characters", characters)
    families, missing = pictures.find_fonts("the" + nobody_has)
    assert missing == nobody_has and pictures.find_fonts("the") == (families, "")
    assert pictures.find_fonts("the" + one_has) == ([*families, "cmr10"], "")


def test_characters_without_a_font_are_reported_and_stay_text_in_svg(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pictures._characters
    monkeypatch.setattr(pictures, "_characters", lambda path: real(path) - {ord("x")})
    says = "no installed font has x, so boxes are drawn instead"
    for text, picture, is_said in (("fox", "a.png", 1), ("the", "b.png", 0), ("fox", "a.svg", 0)):
        done = command("attend", text, "tied", "-o", tmp_path / picture, cwd=trained)
        assert (says in done.stderr) == is_said
    assert ">x</text>" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_the_page_is_one_file_with_the_attention(attention: Attention) -> None:
    html = attention_page(attention)
    asks_for_nothing(html)
    assert CAUTION in html.decode()
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
    broken = replace(attention, tokens=["</script>", "<b>", "&", '"', *attention.tokens[4:]])
    found, usual = (elements(attention_page(shown)) for shown in (broken, attention))
    assert [name for name, _ in found.found] == [name for name, _ in usual.found]
    assert json.loads(found.scripts[0])["tokens"][:4] == broken.tokens[:4]


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
    np.testing.assert_allclose(drawn(less, attention), attention.weights, atol=less["least"] / 255)
    uniform = np.tril(np.ones((60, 60))) / np.arange(1, 61)[:, None]
    attention.weights[0, 0] = uniform  # of which little is held, and all is drawn
    shown = drawn(packed_maps(attention.weights), attention)[0, 0, 30:]
    np.testing.assert_allclose(shown, uniform[30:], atol=0.5 / 255)


def opened_page(open_page: Any, attention: Attention) -> Any:
    """Open the page and wait until it has drawn all heads."""
    view = open_page(attention_page(attention))
    view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
    return view


@pytest.mark.slow
def test_gpt2_with_a_full_context_stays_below_5_mb(open_page: Any) -> None:
    attention = attention_like(12, 12, 1024, 50_257)
    assert len(attention_page(attention)) < 5_000_000
    view = opened_page(open_page, attention)
    view.locator("#thumbnails button", has_text="layer 12 head 12").click()
    assert view.inner_text("#head-caption").startswith("Layer 12, head 12")
    assert np.nanmax(darkness(view, "#large canvas")) > 100


def shares(view: Any) -> list[float]:
    """The tints of the text."""
    script = "all => all.map(one => Number(one.style.getPropertyValue('--fraction')))"
    found: list[float] = view.locator("#text button").evaluate_all(script)
    return found


@pytest.fixture(name="view")
def a_page(open_page: Any, attention: Attention) -> Any:
    return opened_page(open_page, attention)


def test_pointing_and_keys_choose_a_token_and_its_weights(view: Any, attention: Attention) -> None:
    def shows(place: int) -> None:
        np.testing.assert_allclose(shares(view), attention.weights[0, 0, place], atol=0.003)
        token, _ = attention.next_tokens(place)[0]
        assert view.locator("#next .candidate").first.text_content() == visible(token)
        assert f"token {place + 1} of {len(TEXT)}" in view.inner_text("#chosen")
        captions = view.locator("#thumbnails small").all_text_contents()
        for caption, weights_T in zip(
            captions, attention.weights[:, :, place].reshape(4, -1), strict=True
        ):
            assert abs(float(caption.split("%")[0]) - 100 * weights_T.max()) < 0.75

    shows(len(TEXT) - 1)
    view.hover("#text button >> nth=5")
    shows(5)
    view.mouse.move(0, 0)
    view.press("#text [aria-pressed=true]", "ArrowRight")
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
    assert view.inner_text(".tooltip").startswith("“␣” gives ")
    share = float(view.inner_text(".tooltip").split()[2][:-1])
    assert share == pytest.approx(100 * attention.weights[0, 0, 9, 2], abs=0.75)


def test_the_temperature_changes_the_next_tokens(view: Any, attention: Attention) -> None:
    view.hover("#text button >> nth=4")
    view.focus("#temperature")
    logs_V = np.log(attention.probabilities[4].astype(np.float64))
    for temperature, presses in ((1.0, 0), (1.5, 5), (0.5, -10), (0.1, -4), (2.0, 19)):
        for _ in range(abs(presses)):
            view.keyboard.press("ArrowRight" if presses > 0 else "ArrowLeft")
        assert view.locator("#temperature-shown").text_content() == f"{temperature:.1f}"
        weights = np.exp((logs_V - logs_V.max()) / temperature)
        wanted = np.sort(weights / weights.sum())[::-1][:CANDIDATES]
        shown = [float(x.strip("< %")) for x in view.locator("#next .percent").all_text_contents()]
        np.testing.assert_allclose(shown[:-1], 100 * wanted, atol=0.51)
        assert shown[-1] == pytest.approx(100 * (1 - wanted.sum()), abs=0.51)


@pytest.mark.smoke
def test_a_head_is_chosen_in_the_grid(view: Any, attention: Attention) -> None:
    past = np.tril_indices(len(TEXT))

    def shows(layer: int, head: int) -> None:
        map_TT = attention.weights[layer, head]
        for canvas in ("#large canvas", f"#thumbnails button >> nth={2 * layer + head} >> canvas"):
            found = darkness(view, canvas)
            assert np.isnan(found[np.triu_indices(len(TEXT), 1)]).all()
            assert np.corrcoef(found[past], np.sqrt(map_TT[past]))[0, 1] > 0.98
        np.testing.assert_allclose(shares(view), map_TT[-1], atol=0.003)
        name = f"Layer {layer + 1}, head {head + 1}: “{visible(TEXT[-1])}” attends to"
        assert view.inner_text("#head-caption").startswith(name)
        pressed = view.locator("#thumbnails [aria-pressed=true]")
        assert f"layer {layer + 1} head {head + 1}" in pressed.inner_text()

    shows(0, 0)
    view.locator("#thumbnails button", has_text="layer 2 head 1").click()
    shows(1, 0)
    for key, place in (
        ("ArrowRight", (1, 1)), ("ArrowUp", (0, 1)), ("ArrowLeft", (0, 0)),
        ("ArrowDown", (1, 0)), ("End", (1, 1)), ("ArrowDown", (1, 1)), ("Home", (0, 0)),
    ):  # fmt: skip
        view.keyboard.press(key)
        shows(*place)


def test_cells_are_blocks_of_a_long_text(open_page: Any) -> None:
    attention = attention_like(1, 4, 300, 7)
    cells = 96
    member = np.eye(cells)[np.arange(300) * cells // 300]
    blocks = member.T @ attention.weights[0, 3] @ member / member.sum(0)[:, None]
    np.testing.assert_allclose(blocks.sum(-1), 1, atol=1e-4)
    past = np.tril_indices(cells)
    view = opened_page(open_page, attention)
    found = darkness(view, "#thumbnails button >> nth=3 >> canvas")
    assert np.corrcoef(found[past], np.sqrt(blocks[past]))[0, 1] > 0.95


def test_maps_take_the_colour_of_the_scheme(view: Any) -> None:
    first_pixel = """() => {
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(document.querySelector("#large canvas"), 0, 0);
      return copy.getImageData(0, 0, 1, 1).data.join();
    }"""
    assert view.evaluate(first_pixel) == "11,47,94,255"
    view.emulate_media(color_scheme="dark")
    # The page redraws with one of its next frames, late on a busy machine.
    until(view, f"({first_pixel})() === '207,230,255,255'")


def test_the_attention_page_fits_phones_and_paper(
    browser: Any, attention: Attention, tmp_path: Path
) -> None:
    (tmp_path / "map.html").write_bytes(attention_page(attention))
    check_fits(browser, tmp_path / "map.html", "attend")
