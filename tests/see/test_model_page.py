"""Pages in which models compute, held to the textbook pass, to `sample` and to our tokenizers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.generation.decoders import fastest_decoding
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import Bigram, LanguageModel, Transformer
from attnlm.model.recorder import record
from attnlm.model.spec import Use
from attnlm.model.textbook import forward
from attnlm.see.attribution import attribution
from attnlm.see.model_page import model_data, play_page
from attnlm.tokens import byte_pairs
from attnlm.tokens.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from docs.gallery import FOLDER, PAGES, data_of
from tests.browser import check_fits, darkness, opened, until
from tests.kit import command, fails
from tests.models import FRUITS, V, small_model, some_ids, variants_with

IDLE = "!attnlm.modelPage.isBusy"
READ = f"{IDLE} && !attnlm.modelPage.isEdited"
LETTERS = CharTokenizer("abcdefghij\n")
PLAYED = variants_with(Use.PAGE)
HOSTILE = ("</script>", "<!--", "'\"`${1}", "\u2028", "\u2066x\u202e", "\0", "\\u003c", "&lt;b>")


def shown(
    name: str,
    model: Bigram | Transformer,
    tokenizer: Tokenizer = LETTERS,
    number_type: str | None = None,
) -> dict[str, Any]:
    weights = {key: value.detach() for key, value in model.state_dict().items()}
    return model_data(name, model.architecture, weights, tokenizer, f"{name}.", number_type)


def page_of(tmp_path: Path, *models: dict[str, Any], prompt: str = "") -> Path:
    path = tmp_path / "page.html"
    path.write_bytes(play_page(models, prompt))
    return path


@pytest.fixture(scope="module")
def all_variants(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An opened page that holds a model of each of PLAYED."""
    models = [shown(name, small_model(name)) for name in PLAYED]
    with opened(browser, page_of(tmp_path_factory.mktemp("variants"), *models)) as view:
        yield view


def check_logits(view: Any, rounding: torch.dtype) -> None:
    """Compare the page's logits with the textbook pass of the rounded weights."""
    for number, name in enumerate(PLAYED):
        model = small_model(name)
        ids = some_ids(min(model.architecture.block_size, 13))
        weights = {key: w.to(rounding).double() for key, w in model.state_dict().items()}
        expected_V = forward(model.architecture, weights, ids)[-1].numpy()
        # The second call takes from the first one what the ids have in common.
        for script in ("model.logits(ids)", "model.logits(ids.slice(0, 3)) && model.logits(ids)"):
            found = view.evaluate(
                f"([n, ids]) => {{ const model = attnlm.models[n]; return [...{script}]; }}",
                [number, ids.tolist()],
            )
            assert np.abs(found - expected_V).max() <= 1e-4 * np.abs(expected_V).max(), name


def test_logits_of_every_variant_equal_the_textbook_pass(
    all_variants: Any, browser: Any, tmp_path: Path
) -> None:
    check_logits(all_variants, torch.float32)
    models = [shown(name, small_model(name), number_type="f16") for name in PLAYED]
    with opened(browser, page_of(tmp_path, *models)) as view:
        check_logits(view, torch.float16)


def test_attention_of_every_variant_equals_the_model(all_variants: Any) -> None:
    for number, name in enumerate(PLAYED):
        ids = some_ids(9)
        seen = record(small_model(name), ids[None])
        expected = [layer.maps[0] for layer in seen.layers if layer.softmaxes]
        found = all_variants.evaluate(
            "([n, ids]) => attnlm.models[n].attention(ids).map((l) => l.map((m) => [...m]))",
            [number, ids.tolist()],
        )
        assert len(found) == len(expected), name
        for ours, theirs in zip(expected, found, strict=True):
            maps = np.array(theirs).reshape(-1, 9, 9)
            assert np.abs(maps - ours.numpy()).max() < 1e-5, name


def test_parts_of_a_logit_equal_the_attribution(all_variants: Any) -> None:
    for number, name in enumerate(PLAYED):
        model, ids = small_model(name), some_ids(9)
        expected = attribution(model, ids.tolist(), 3)
        script = "([n, ids]) => attnlm.models[n].added(ids, 3)"
        found = all_variants.evaluate(script, [number, ids.tolist()])
        assert [part for part, _ in found] == [part for part, _ in expected], name
        scale = max((abs(logit) for _, logit in expected), default=1.0)
        for (_, theirs), (_, ours) in zip(found, expected, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-4 * scale), name


def check_greedy(view: Any, number: int, model: LanguageModel) -> list[int]:
    """Compare 200 tokens, far past the context of 13, with `sample`; return them."""
    config = SamplingConfig(tokens=200, temperature=0, seed=1)
    blocks = list(fastest_decoding(model.float(), choose_device("cpu")).generate([1, 2, 3], config))
    expected: list[int] = np.concatenate(blocks)[:, 0].tolist()
    script = "attnlm.models[%d].generate({ids: [1, 2, 3], tokens: 200, temperature: %s})"
    for temperature in ("0", "1e-300"):
        assert view.evaluate(script % (number, temperature)) == expected
    return expected


@pytest.mark.parametrize("name", PLAYED)
def test_greedy_tokens_equal_sample(name: str, all_variants: Any) -> None:
    check_greedy(all_variants, PLAYED.index(name), small_model(name))


def test_tokens_are_drawn_as_often_as_their_probabilities_say(browser: Any, tmp_path: Path) -> None:
    model = small_model("bigram").float()
    logits_V = model.state_dict()["table.weight"][4].numpy().astype(float)
    weights_V = np.exp((logits_V - logits_V.max()) / 0.7)
    kept = np.argsort(-weights_V)[:5]
    kept = kept[: 1 + int(np.searchsorted(np.cumsum(weights_V[kept]) / weights_V[kept].sum(), 0.9))]
    expected_V = np.zeros(V)
    expected_V[kept] = weights_V[kept] / weights_V[kept].sum()
    draw = """async (draws) => {
      const counts = Array(11).fill(0);
      for (let seed = 0; seed < draws; seed++) {
        const options = {ids: [4], tokens: 1, temperature: 0.7, topK: 5, topP: 0.9, seed};
        counts[(await attnlm.models[0].generate(options))[0]]++;
      }
      return counts;
    }"""
    with opened(browser, page_of(tmp_path, shown("bigram", model))) as view:
        counts_V = np.array(view.evaluate(draw, 4000))
    deviation_V = np.sqrt(4000 * expected_V * (1 - expected_V))
    assert (np.abs(counts_V - 4000 * expected_V) <= 5 * deviation_V).all()


def tokenizers() -> list[Tokenizer]:
    trained = byte_pairs.train_vocabulary("bpe:300", 300, [FRUITS])
    special = {"<|endoftext|>": 300, "<|im_start|>": 301}
    others = [
        BpeTokenizer(name, trained.ranks, vocab_size=302, special=special, nfc=name == "qwen2")
        for name in ("cl100k_base", "o200k_base", "llama3", "qwen2", "smollm")
    ]
    return [ByteTokenizer(), trained, *others]


def awkward_texts() -> list[str]:
    generator = random.Random(1)
    signs = "abs'tTS \n\r\t\u00a0\u0085\ufeff12é\u0301ſK漢👍!?/_<|"
    made = ("".join(generator.choices(signs, k=generator.randrange(1, 40))) for _ in range(200))
    return [
        "I'll  don't I'LL we'Re ITſ x's'T apples and 12345 6\u0663 pears",
        "  \n\n \t x\r\n\r\n  ",
        "<|endoftext|>x<|im_start|>",
        "naïve e\u0301 漢字 👩‍👩‍👧 a\u0085b\u2028c",
        *made,
    ]


def test_ids_and_texts_equal_every_tokenizer(browser: Any, tmp_path: Path) -> None:
    texts = awkward_texts()
    models = [(small_model("multi-head", one.vocab_size), one) for one in tokenizers()]
    page = page_of(tmp_path, *(shown(one.name, model, one) for model, one in models))
    with opened(browser, page) as view:
        for number, (model, tokenizer) in enumerate(models):
            encoded = [tokenizer.encode(text) for text in texts]
            script = "([n, texts]) => texts.map((text) => attnlm.models[n].encode(text))"
            assert view.evaluate(script, [number, texts]) == encoded, tokenizer.name
            script = "([n, all]) => all.map((ids) => attnlm.models[n].decode(ids))"
            made = check_greedy(view, number, model)
            parts = [*encoded, made, [255, 65], [240, 159, 145]]
            assert view.evaluate(script, [number, parts]) == list(map(tokenizer.decode, parts))


def test_typing_shows_the_next_token_and_what_the_last_one_attends_to(
    browser: Any, tmp_path: Path
) -> None:
    model = small_model("multi-head").float()
    ids_BT = torch.tensor([LETTERS.encode("abcab")])
    probabilities_V = model(ids_BT)[0, -1].detach().softmax(-1)
    likeliest = LETTERS.decode([int(probabilities_V.argmax())])
    seen = record(model, ids_BT)
    weight = float(seen.maps[0, 0, 1, 4].max())
    with opened(browser, page_of(tmp_path, shown("multi-head", model))) as view:
        view.fill("#prompt", "abcab")
        first = view.locator("#models li").first
        first.filter(has_text=likeliest).wait_for()
        assert first.inner_text().split()[-1] == percent(float(probabilities_V.max()))
        view.locator("#thumbnails button").nth(1).click()
        caption = view.locator("#head-caption")
        caption.filter(has_text="Layer 1, head 2").wait_for()
        assert f"attends to {percent(weight)}" in caption.inner_text()
        view.fill("#prompt", "abz")
        view.locator("#status", has_text="“z”").wait_for()  # which the vocabulary lacks
        view.fill("#prompt", "ab")
        until(view, "document.getElementById('status').textContent === ''")


def percent(probability: float) -> str:
    return f"{100 * probability:.{1 if probability < 0.0995 else 0}f}%"


def test_a_head_that_is_switched_off_adds_nothing(browser: Any, tmp_path: Path) -> None:
    model = small_model("transformer").float()
    ids = LETTERS.encode("abcabca")
    with torch.inference_mode():
        expected_V = record(model, torch.tensor([ids]), (1, 2)).logits[0, -1]
    asked = "(ids) => [...attnlm.models[0].logits(ids)]"
    with opened(browser, page_of(tmp_path, shown("transformer", model))) as view:
        view.fill("#prompt", "abcabca")
        before = view.evaluate(asked, ids)
        view.locator("#thumbnails button", has_text="layer 2 head 3").click()
        view.locator("#switch").click()
        off_V = view.evaluate(asked, ids)
        assert np.abs(off_V - expected_V.numpy()).max() < 1e-4
        until(view, IDLE)
        shown_parts = view.locator("#added li", has_text="layer 2 head 3")
        assert shown_parts.locator(".percent").inner_text() == "0.000"
        total = sum(map(float, view.locator("#added .percent").all_text_contents()))
        assert view.locator("#added-sum").inner_text() == f"{float(expected_V.max()):.3f}"
        assert total == pytest.approx(float(expected_V.max()), abs=0.02)
        view.locator("#thumbnails .off").first.wait_for()  # the page draws them a little later
        assert view.locator("#thumbnails .off").count() == 1
        # The bars show the probabilities before and after the change.
        assert view.inner_text(".change") == "all heads on → layer 2 head 3 off"
        before_V, after_V = (torch.tensor(x).softmax(-1) for x in (before, off_V))
        for bar in view.locator("#models .next li").all():
            token, *percents = bar.locator("> :not(.bars)").all_inner_texts()
            (number,) = LETTERS.encode({"⏎": "\n"}.get(token, token))
            assert percents == [percent(float(p_V[number])) for p_V in (before_V, after_V)]
        view.locator("#switch").click()
        assert view.evaluate(asked, ids) == before
        until(view, IDLE)
        assert view.inner_text(".change") == "layer 2 head 3 off → all heads on"


GENERATED = """async ([number, off, seed]) => {
  const after = attnlm.models[number].withSilenced(off);
  const ids = after.encode(document.querySelector("#prompt").value);
  return after.decode(await after.generate({ids, tokens: 40, seed}));
}"""


@pytest.mark.parametrize("count", [1, 4])
def test_the_switch_of_a_head_and_its_effect_fit_one_screen(
    count: int, browser: Any, tmp_path: Path
) -> None:
    """The switch of a head, the bars, and the texts with and without it, from the same seed."""
    names = ("bigram", "average", "transformer", "multi-head")[-count:]
    page = page_of(tmp_path, *(shown(name, small_model(name).float()) for name in names))
    with opened(browser, page, viewport={"width": 1300, "height": 900}) as view:
        view.fill("#prompt", "abcabca")
        view.fill("#tokens", "40")
        view.click("#run")
        until(view, f"document.querySelectorAll('.sampled').length === {40 * count}")
        seed = view.evaluate("attnlm.modelPage.seed")
        view.locator("#thumbnails button", has_text="head 2").click()
        view.click("#switch")
        until(view, f"document.querySelectorAll('.sampled').length === {40 * (count + 1)}")
        until(view, f"{IDLE} && !attnlm.modelPage.generation")
        texts = view.locator(".shown .generated").all_text_contents()
        last = count - 1
        assert texts == [view.evaluate(GENERATED, [last, off, seed]) for off in ([], [[0, 1]])]
        assert texts[0] != texts[1]
        notes = view.locator(".shown .written .note").all_inner_texts()
        assert notes == [f"seed {seed}: all heads on", f"seed {seed}: head 2 off"]
        for part in ("#switch", "#run", ".shown .next", ".shown .change", ".shown .generated"):
            for box in (one.bounding_box() for one in view.locator(part).all()):
                assert box["y"] >= 0 and box["y"] + box["height"] <= 900, part
        assert view.evaluate("scrollY") == 0
        column = "document.querySelector('.act')"
        assert view.evaluate(f"{column}.scrollHeight <= {column}.clientHeight")
        # What was changed stays on the screen while the other column scrolls.
        view.evaluate("scrollTo(0, 1500)")
        for part in ("#switch", ".shown .next", ".shown .generated >> nth=1"):
            box = view.locator(part).first.bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= 900, part
        # `Start again` generates from the prompt, with the same seed.
        view.click("#again")
        until(view, f"document.querySelectorAll('.sampled').length === {40 * (count + 1)}")
        assert view.locator(".shown .generated").all_text_contents() == texts


def test_bars_describe_the_text_of_the_box(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(tmp_path, shown("average", small_model("average")))) as view:
        view.fill("#prompt", "abcab")
        until(view, READ)
        bars = view.inner_text("#models .next")
        view.click("#run")
        until(view, "document.querySelectorAll('.sampled').length === 200")
        until(view, IDLE)
        assert (
            view.inner_text("#after-text") == "abcab" and view.inner_text("#models .next") == bars
        )
        view.fill("#seed", "3")
        view.click("#one")
        until(view, "document.querySelector('#prompt').value.length === 6")
        until(view, READ)
        text = view.input_value("#prompt")
        assert view.inner_text("#after-text") == text.replace("\n", "⏎")
        assert re.fullmatch("“.” had [0-9.]+%", view.inner_text("#drawn"))
        assert view.locator("#text button").count() == 6 and view.locator(".sampled").count() == 0


def test_the_table_of_a_bigram_equals_its_weights(browser: Any, tmp_path: Path) -> None:
    model = small_model("bigram").float()
    probabilities_VV = model.state_dict()["table.weight"].softmax(-1).numpy()
    with opened(browser, page_of(tmp_path, shown("bigram", model))) as view:
        view.fill("#prompt", "abc")
        until(view, READ)
        drawn = darkness(view, "#table canvas")
        assert drawn.shape == (V, V)
        assert np.corrcoef(drawn.ravel(), np.sqrt(probabilities_VV.ravel()))[0, 1] > 0.98
        likeliest = int(probabilities_VV[2].argmax())
        token = {"\n": "⏎"}.get(LETTERS.decode([likeliest]), LETTERS.decode([likeliest]))
        said = f"“{token}” after “c”: {percent(float(probabilities_VV[2, likeliest]))}, logit "
        assert view.inner_text("#table-cell").startswith(said)
        view.focus("#table .picture")
        view.keyboard.press("ArrowUp")
        assert "after “b”" in view.inner_text("#table-cell")
        assert view.locator("#flow button").all_inner_texts() == ["logits", "probabilities"]
        assert view.is_hidden("#heads-body") and view.is_hidden("#switch")


def test_steps_lead_through_a_head_with_their_arithmetic_nearby(
    browser: Any, tmp_path: Path
) -> None:
    """Each number that is shown equals the model's, and the products sum to it."""
    model = small_model("transformer").float()
    seen = record(model, torch.tensor([LETTERS.encode("abcab")]))
    heads = seen.layers[0].heads
    assert heads is not None
    names = [
        *("embedding", "input", "q", "k", "v", "scores", "weights", "mix", "attention"),
        *("with attention", "MLP input", "hidden", "MLP", "after layer 1"),
    ]
    page = page_of(tmp_path, shown("transformer", model))
    with opened(
        browser, page, viewport={"width": 1300, "height": 900}, reduced_motion="reduce"
    ) as view:
        view.fill("#prompt", "abcab")
        until(view, READ)
        assert view.locator("#flow button").all_inner_texts() == names
        for number, name in enumerate(names):
            assert view.inner_text("#flow [aria-current]") == name
            assert view.inner_text("#step-title").startswith(f"{number + 1} of {len(names)}: ")
            total = view.evaluate("document.querySelector('#explanation .total')?.textContent")
            if name in ("q", "scores", "mix", "hidden"):  # each row is: number, factors, product
                rows = view.locator(".arithmetic tbody tr").all()
                terms = [[float(x) for x in row.locator("td").all_inner_texts()] for row in rows]
                for x, y, product in terms:
                    assert product == pytest.approx(x * y, abs=0.006 * (1 + abs(x) + abs(y)))
                summed = float(total.rpartition(" ")[2])
                assert summed == pytest.approx(sum(p for *_, p in terms), abs=0.01 * len(terms))
            if name == "scores":
                drawn = darkness(view, ".outcome canvas")
                assert (np.nanmax(drawn, 1) == np.nanmax(drawn)).all()  # in each row
                past = np.tril_indices(5)
                scores = np.full((5, 5), -np.inf)
                scores[past] = heads.scores[0, 0].numpy()[past]
                below = np.clip(1 - (scores.max(-1, keepdims=True) - scores) / 6, 0, 1)
                assert np.corrcoef(drawn[past], below[past])[0, 1] > 0.95
            if name == "weights":
                column = view.locator(".arithmetic tbody tr")
                powers = [float(x) for x in column.locator("td:nth-child(3)").all_inner_texts()]
                assert float(total.rpartition(" ")[2]) == pytest.approx(sum(powers), abs=0.05)
                shares = [float(x) for x in column.locator("td:nth-child(4)").all_inner_texts()]
                assert shares == pytest.approx(seen.maps[0, 0, 0, 4].tolist(), abs=0.006)
            chosen, arithmetic = (
                view.locator(part).bounding_box()
                for part in (".outcome .highlight", "#explanation")
            )
            assert 0 <= arithmetic["y"] - chosen["y"] < 300, name
            if number + 1 < len(names):
                view.click("#next-step")
        view.click("#next-step")  # leads to the next layer
        until(view, f"attnlm.modelPage.headsView.layer === 1 && {IDLE}")
        assert view.inner_text("#flow [aria-current]") == "after layer 1"
        assert view.locator("#flow button").last.inner_text() == "probabilities"


def test_the_lens_is_shown_only_for_a_residual_stream(browser: Any, tmp_path: Path) -> None:
    names = ("wide-head", "transformer")
    with opened(
        browser, page_of(tmp_path, *(shown(name, small_model(name)) for name in names))
    ) as view:
        view.fill("#prompt", "abc")
        until(view, READ)
        assert view.locator("#lens tbody tr").count() == 3
        view.locator("#models h3 button", has_text="wide-head").click()
        until(view, IDLE)
        assert view.is_hidden("#lens-section")


WIDTHS = pytest.mark.parametrize("width", [1300, 400])


@WIDTHS
def test_the_controls_work_by_keyboard(width: int, browser: Any, tmp_path: Path) -> None:
    page = page_of(tmp_path, shown("multi-head", small_model("multi-head").float()))
    with opened(browser, page, viewport={"width": width, "height": 900}) as view:
        view.focus("#prompt")
        view.keyboard.type("abcab")
        view.locator("#text button").nth(4).wait_for()
        until(view, IDLE)
        view.focus("#text button[tabindex='0']")
        view.keyboard.press("ArrowLeft")
        assert view.locator("#text button[aria-pressed='true']").all_inner_texts() == ["a"]
        view.focus("#thumbnails [tabindex='0']")
        view.keyboard.press("ArrowRight")
        until(view, IDLE)
        assert "Layer 1, head 2: “a” attends to" in view.inner_text("#head-caption")
        view.focus("#large .picture")
        view.keyboard.press("ArrowLeft")
        assert re.match("“a” gives [0-9.]+% to “c”", view.inner_text("#head-caption"))
        row, column = view.evaluate("attnlm.modelPage.walkthrough.cell")
        view.focus(".outcome .matrix")
        view.keyboard.press("ArrowUp")
        said = f"embedding[“{'abcab'[row - 1]}”, {column + 1}] = "
        assert view.inner_text("#explanation").startswith(said)
        view.focus("#next-step")
        view.keyboard.press("Enter")
        view.locator("#flow [aria-current]", has_text="q").wait_for()
        view.focus("#tokens")
        view.keyboard.press("ControlOrMeta+a")
        view.keyboard.type("12")
        view.keyboard.press("Enter")
        until(view, "document.querySelectorAll('.sampled').length === 12")
        until(view, "document.querySelector('#run').textContent === 'Generate'")
        until(view, IDLE)
        view.focus("#one")
        view.keyboard.press("Enter")
        until(view, "document.querySelector('#prompt').value.length === 6")


@WIDTHS
def test_clicks_choose_heads_and_numbers_and_hovering_shows_weights(
    width: int, browser: Any, tmp_path: Path
) -> None:
    """A number of the scores is the product of a query and a key, which are framed."""
    model = small_model("multi-head").float()
    ids_BT = torch.tensor([LETTERS.encode("abcab")])
    heads = record(model, ids_BT).layers[0].heads
    assert heads is not None
    page = page_of(tmp_path, shown("multi-head", model))
    with opened(browser, page, viewport={"width": width, "height": 900}) as view:
        view.fill("#prompt", "abcab")
        until(view, IDLE)
        view.locator("#thumbnails button", has_text="head 3").click()
        view.locator("#head-caption", has_text="Layer 1, head 3: “b”").wait_for()
        until(view, IDLE)
        box = view.locator("#large .picture").bounding_box()
        view.hover("#large .picture", position={"x": 1, "y": box["height"] * 0.9})
        assert view.inner_text(".tooltip").startswith("“b” gives ")
        view.hover("#large .picture", position={"x": box["width"] * 0.9, "y": 2})
        assert view.inner_text(".tooltip") == "“a” can't see “b”, which comes later"
        view.locator("#flow button", has_text="scores").click()
        view.locator(".outcome strong", has_text="scores[").wait_for()
        scores = view.locator(".outcome .matrix")
        box = scores.bounding_box()
        scores.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.9})
        score = float(heads.scores[0, 2, 4, 1])
        assert view.inner_text("#explanation").startswith(f"scores[“b”, “b”] = {score:.2f}\n")
        assert view.locator("#walkthrough .highlight").count() == 3
        view.locator("#as-arcs").click()
        assert view.locator("#large path").count() > 0
        view.locator("#large svg text", has_text="c").click()
        assert "“c” attends to" in view.inner_text("#head-caption")


def test_several_models_can_be_chosen_and_typing_stops_generation(
    browser: Any, tmp_path: Path
) -> None:
    names = ("bigram", "multi-head", "transformer")
    page = page_of(tmp_path, *(shown(name, small_model(name).float()) for name in names))
    with opened(browser, page) as view:
        view.fill("#prompt", "abcab")
        assert view.locator("#models h3").all_inner_texts() == list(names)
        for name, heads in (("multi-head", 4), ("transformer", 8)):
            view.locator("#models h3 button", has_text=name).click()
            until(view, f"document.querySelector('#thumbnails').children.length === {heads}")
        view.locator("#models h3 button", has_text="bigram").click()
        view.locator("#heads-title", has_text="no attention").wait_for()
        assert not view.is_visible("#thumbnails")
        view.locator("#table canvas").wait_for()
        view.fill("#tokens", "30")
        view.click("#run")
        until(view, "document.querySelectorAll('.sampled').length === 90")
        view.fill("#tokens", "100000")
        view.click("#run")
        until(view, "document.querySelectorAll('.sampled').length > 100")
        view.fill("#prompt", "abc")  # typing ends it and starts again
        until(view, "document.querySelector('#run').textContent === 'Generate'")
        until(view, IDLE)
        assert view.locator(".sampled").count() == 0
        assert view.locator("#text button").all_inner_texts() == ["a", "b", "c"]


def test_a_hostile_tokenizer_shows_text_and_runs_nothing(browser: Any, tmp_path: Path) -> None:
    characters = "".join(dict.fromkeys("".join(HOSTILE) + "\n"))
    tokenizer = CharTokenizer(characters)
    special = {text: 256 + i for i, text in enumerate(("</script>", "<img/onerror=alert(1)>"))}
    single_bytes = [bytes([byte]) for byte in range(256)]
    pairs = BpeTokenizer("cl100k_base", single_bytes, vocab_size=258, special=special)
    name = "</p></script><script>alert(1)</script><b>"  # also in what the page says of the model
    models = [
        shown(name, small_model("multi-head", tokenizer.vocab_size), tokenizer),
        shown("pairs", small_model("multi-head", pairs.vocab_size), pairs),
    ]
    with opened(browser, page_of(tmp_path, *models)) as view:
        view.fill("#prompt", "".join(HOSTILE[:5]))
        view.locator("#text button").nth(8).wait_for()
        view.fill("#tokens", "50")
        view.click("#run")
        until(view, "document.querySelectorAll('.sampled').length === 100")
        view.click("#as-arcs")
        until(view, IDLE)
        assert view.locator("img, b:not(.scale b)").count() == 0
        assert not set("\u2028\u2066\u202e\0") & set(view.locator("body").inner_text())


def test_the_play_page_fits_screens_and_paper(browser: Any, tmp_path: Path) -> None:
    models = [shown(name, small_model(name)) for name in ("bigram", "multi-head", "transformer")]
    page = page_of(tmp_path, *models, prompt="abcabcabcabc")
    check_fits(browser, page, "play")


def test_a_page_is_little_larger_than_its_weights() -> None:
    model = small_model("transformer", embed_dim=128, block_size=64, layers=4).float()
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    for number_type, most in (("f32", 1.4), ("f16", 0.7)):
        page = play_page([shown("x", model, number_type=number_type)])
        assert len(page) <= most * weights + 150_000


def test_a_small_model_with_gpt2s_vocabulary_is_as_small_a_page(gpt2: BpeTokenizer) -> None:
    """The vocabulary takes 0.43 MB; with less than 13 numbers per token, the page is larger."""
    model = small_model("multi-head", gpt2.vocab_size, embed_dim=16, block_size=64).float()
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    assert len(play_page([shown("x", model, gpt2)])) <= 1.4 * weights + 150_000


ENLARGED = (
    *((".outcome .matrix", "height"), (".outcome .row-names", "fontSize"), (".scale", "fontSize")),
    *((".labelled .rows", "fontSize"), (".next", "fontSize"), (".scale span", "width")),
)


def test_the_command_writes_runs_as_a_page(trained: Path, browser: Any, tmp_path: Path) -> None:
    folder = trained / "checkpoints"
    page = tmp_path / "page.html"
    how = ("--to", "html", "--checkpoint-dir", folder, "--json")
    done = command("export", "multi-head", "tied", page, *how, cwd=tmp_path)
    run = attnlm.open_run("multi-head", checkpoint_dir=folder)
    told = json.loads(done.stdout)
    assert told["path"] == str(page) and told["page"].startswith("a page of ")
    assert told["checkpoint"] == "best" and told["parameters"] > run.parameters
    text = "".join(attnlm.sample(run, tokens=100, prompt="the q", temperature=0, device="cpu"))
    with opened(browser, page) as view:
        assert view.evaluate("attnlm.models.map((model) => model.name)") == ["multi-head", "tied"]
        assert view.input_value("#prompt") == "".join(run.ticker_passage()) != ""
        made = view.evaluate(
            """async () => {
              const [model] = attnlm.models, ids = model.encode("the q");
              const made = await model.generate({ids, tokens: 100, temperature: 0});
              return model.decode([...ids, ...made]);
            }"""
        )
    assert made == text
    named = ("export", "multi-head", "named.html", "--title", "A <b>lesson", "--text", "the q")
    command(*named, *how, cwd=tmp_path)
    best = run.result().best.val_loss  # type: ignore[union-attr]
    with opened(browser, tmp_path / "named.html") as view:
        assert view.title() == view.inner_text("h1") == "A <b>lesson"
        assert view.input_value("#prompt") == "the q"
        assert f"trained on foxes to a loss of {best:.2f}" in view.inner_text("summary")
        assert view.is_hidden("#about dl")
        view.click("summary")
        for fact in (f"{best:.4f} nats per token", "30 of 30", "the quick brown fox jumps over"):
            assert fact in view.inner_text("#about")
        view.click("#present")  # closes it, and enlarges cells, labels and legend
        assert view.is_hidden("#about dl")
        until(view, IDLE)
        size = "getComputedStyle(document.querySelector('%s')).%s"
        large = [view.evaluate(size % part) for part in ENLARGED]
        view.evaluate("attnlm.modules['model_page.js'].present(false)")
        for part, before in zip(ENLARGED, large, strict=True):
            assert float(before[:-2]) > 1.3 * float(view.evaluate(size % part)[:-2]), part


def test_a_page_that_cannot_be_written_is_refused_in_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there.html").write_text("mine")
    how = ("--to", "html", "--checkpoint-dir", trained / "checkpoints")

    def refused(*words: str, code: int, says: str, hints: str) -> None:
        fails("export", *words, *how, cwd=tmp_path, code=code, says=says, hints=hints)
        assert [path.name for path in tmp_path.iterdir()] == ["there.html"]
        assert (tmp_path / "there.html").read_text() == "mine"

    refused("bigram", "there.html", code=1, says="there.html already exists", hints="--force")
    refused("bigram", "page", code=2, says="must end with .html", hints="page.html")
    refused("bigram", "x.html", "--type", "q4", code=2, says="q4", hints="f16")
    refused("bigram", "x.html", "--text", "Ω", code=1, says="Ω", hints="")
    refused("bigram", "x.html", "--text", "a", "--train", code=2, says="--train", hints="type")
    refused("bigrm", "x.html", code=1, says="bigrm", hints="bigram")
    monkeypatch.setattr("attnlm.see.model_page.LARGEST", 1000)
    refused("bigram", "tied", "x.html", code=1, says="too many for a page", hints="--force")
    several = ("export", "bigram", "tied", "out", *how[2:])
    fails(*several, cwd=tmp_path, code=2, says="several runs", hints="html")
    titled = ("export", "bigram", "out", "--title", "A", *how[2:])
    fails(*titled, cwd=tmp_path, code=2, says="--title", hints="html")
    fails("export", "bigram", "x.html", *how[2:], cwd=tmp_path, code=2, says="x.html", hints="html")
    command("export", "tied", "there.html", *how, "--force", cwd=tmp_path)
    assert "unpackModels" in (tmp_path / "there.html").read_text(encoding="utf-8")
    (tmp_path / "link.html").symlink_to("there.html")
    to_link = ("export", "tied", "link.html", *how, "--force")
    fails(*to_link, cwd=tmp_path, code=1, says="not a regular file", hints="another name")


def test_a_weight_beyond_float16_is_refused() -> None:
    model = small_model("bigram").float()
    with torch.no_grad():
        next(model.parameters())[0, 0] = 1e5
    assert shown("x", model)["type"] == "f32"
    with pytest.raises(AttnlmError, match="weights too large for f16"):
        shown("x", model, number_type="f16")


# --- The pages in docs/gallery --------------------------------------------------------------------


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
      const [model] = attnlm.models;
      const {nextProbabilities} = attnlm.modules["sampling.js"];
      return Math.max(...nextProbabilities(model.logits(model.encode(text))));
    }"""
    with opened(browser, FOLDER / "multi-head.html") as view:
        sure, unsure = (view.evaluate(script, text) for text in ("the bridg", "the "))
    assert (round(100 * sure), round(100 * unsure)) == (98, 16)
