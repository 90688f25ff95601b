"""Pages in which models compute, held to the textbook pass, to `sample` and to our tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.generation.next_token import normalised, unnormalised_probabilities
from attnlm.generation.sampling import sampler_of
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import Bigram, LanguageModel, Transformer
from attnlm.model.layers import LayerNorm, RMSNorm
from attnlm.model.recorder import Site, record, silence
from attnlm.model.textbook import forward
from attnlm.see.model_page import model_data, play_page
from attnlm.tokens.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    train_vocabulary,
)
from docs.gallery import FOLDER, PAGES, data_of
from tests.browser import check_fits, darkness, opened, until
from tests.kit import command, fails
from tests.models import FRUITS, VARIANTS, V, activations, self_attention, small_model, some_ids
from tests.texts import texts_with_special
from tests.tolerances import assert_near

IDLE = "!attnlm.modelPage.isBusy"
READ = f"{IDLE} && !attnlm.modelPage.isEdited"
SAMPLED = "document.querySelectorAll('.sampled').length"
LETTERS = CharTokenizer("abcdefghij\n")
HOSTILE = ("</script>", "<!--", "'\"`${1}", "\u2028", "\u2066x\u202e", "\0", "\\u003c", "&lt;b>")
DESK = {"width": 1300, "height": 900}


def shown(
    name: str,
    model: Bigram | Transformer | None = None,
    tokenizer: Tokenizer = LETTERS,
    number_type: str | None = None,
) -> dict[str, Any]:
    """Return a model for a page; default: the small model of this name."""
    model = model or small_model(name)
    weights = {key: value.detach() for key, value in model.state_dict().items()}
    return model_data(name, model.architecture, weights, tokenizer, f"{name}.", number_type)


@pytest.fixture
def play(open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Opens a page of the small models of some names, and writes a text."""

    def play(*names: str, text: str, **how: Any) -> Any:
        view = open_page(play_page([shown(name) for name in names]), **how)
        view.fill("#prompt", text)
        until(view, READ)
        return view

    return play


def percent(probability: float) -> str:
    return f"{100 * probability:.{1 if probability < 0.0995 else 0}f}%"


# --- What models compute --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_variants(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An opened page that holds a model of each of VARIANTS, and each once more in float16."""
    path = tmp_path_factory.mktemp("variants") / "page.html"
    path.write_bytes(play_page([shown(n, number_type=t) for t in ("f32", "f16") for n in VARIANTS]))
    with opened(browser, path) as view:
        yield view


@torch.no_grad()
def added(model: Bigram | Transformer, ids: torch.Tensor) -> dict[str, float]:
    """What each part adds to the logit of token 3 after a text; the parts sum to the logit."""
    if not isinstance(model, Transformer) or not model.architecture.residual:
        return {}
    seen, a = record(model, ids[None]), model.architecture
    found = activations(model, ids[None])
    parts = {"embedding": found[Site("stream", -1)][0, -1]}
    for number in range(a.layers):
        name = f"layer {number + 1}"
        if a.attention == "softmax":
            projection = self_attention(model, number).projection
            alone_HN = torch.block_diag(*found[Site("heads", number)][0, :, -1])
            alone_HN = alone_HN if projection is None else alone_HN @ projection.weight.T
            parts |= {f"{name} head {h}": added_C for h, added_C in enumerate(alone_HN, 1)}
            if projection is not None and projection.bias is not None:
                parts[f"{name} attention bias"] = projection.bias
        elif (site := Site("attention", number)) in found:
            parts[f"{name} attention"] = found[site][0, -1]
        if (site := Site("mlp", number)) in found:
            parts[f"{name} MLP"] = found[site][0, -1]
    added_NC, norm, weight_C = torch.stack([*parts.values()]), model.norm, model.head.weight[3]
    bias = 0.0 if model.head.bias is None else float(model.head.bias[3])
    if isinstance(norm, LayerNorm):
        added_NC = added_NC - added_NC.mean(-1, keepdim=True)
        bias += 0.0 if norm.bias is None else float(norm.bias @ weight_C)
    if isinstance(norm, LayerNorm | RMSNorm):
        size = (added_NC.sum(0).square().mean() + norm.epsilon).sqrt()
        added_NC = added_NC * norm.gain / size
    logits = dict(zip(parts, (added_NC @ weight_C).tolist(), strict=True))
    logits |= {"biases": bias} if bias else {}
    assert sum(logits.values()) == pytest.approx(float(seen.logits[0, -1, 3]), abs=1e-9)
    return logits


COMPUTED = """([number, ids]) => {
  const model = attnlm.models[number];
  const logits = [...model.logits(ids)];
  model.logits(ids.slice(0, 3)); // from which the next call takes what the ids have in common
  return {
    logits: [logits, [...model.logits(ids)]],
    maps: model.attention(ids).map((layer) => layer.map((map) => [...map])),
    added: model.added(ids, 3),
  };
}"""


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_the_logits_maps_and_parts_of_the_model(
    name: str, all_variants: Any
) -> None:
    model, ids, number = small_model(name), some_ids(13), VARIANTS.index(name)
    exact, half = (
        all_variants.evaluate(COMPUTED, [place, ids.tolist()])
        for place in (number, number + len(VARIANTS))
    )
    for found, rounding in ((exact, torch.float32), (half, torch.float16)):
        weights = {key: w.to(rounding).double() for key, w in model.state_dict().items()}
        expected_V = forward(model.architecture, weights, ids)[-1]
        for logits_V in found["logits"]:
            assert_near(torch.tensor(logits_V), expected_V, within=1e-4)
    maps = [x[0] for site, x in activations(model, ids[None]).items() if site.kind == "maps"]
    for ours, theirs in zip(maps, exact["maps"], strict=True):
        np.testing.assert_allclose(np.reshape(theirs, ours.shape), ours, atol=1e-5)
    parts = added(model, ids)
    assert [part for part, _ in exact["added"]] == [*parts]
    near = 1e-4 * max(map(abs, parts.values()), default=1.0)
    assert [logit for _, logit in exact["added"]] == pytest.approx([*parts.values()], abs=near)


def check_greedy(view: Any, number: int, model: LanguageModel) -> list[int]:
    """Compare 200 tokens, far past the context of 13, with `sample`; return them."""
    config = SamplingConfig(tokens=200, temperature=0, seed=1)
    sampler = sampler_of(model.float(), ByteTokenizer(), choose_device("cpu"))
    expected = [int(ids_B[0]) for ids_B, _ in sampler.generate([[1, 2, 3]], [0], config)]
    script = "attnlm.models[%d].generate({ids: [1, 2, 3], tokens: 200, temperature: %s})"
    for temperature in ("0", "1e-300"):
        assert view.evaluate(script % (number, temperature)) == expected
    return expected


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_equal_sample(name: str, all_variants: Any) -> None:
    check_greedy(all_variants, VARIANTS.index(name), small_model(name))


def test_tokens_are_drawn_as_often_as_their_probabilities_say(all_variants: Any) -> None:
    logits_BV = small_model("bigram").state_dict()["table.weight"][[4]].numpy()
    (expected_V,) = normalised(unnormalised_probabilities(logits_BV, 0.7, 5, 0.9))
    draw = """async ([model, draws]) => {
      const counts = Array(11).fill(0);
      for (let seed = 0; seed < draws; seed++) {
        const options = {ids: [4], tokens: 1, temperature: 0.7, topK: 5, topP: 0.9, seed};
        counts[(await attnlm.models[model].generate(options))[0]]++;
      }
      return counts;
    }"""
    counts_V = np.array(all_variants.evaluate(draw, [VARIANTS.index("bigram"), 4000]))
    deviation_V = np.sqrt(4000 * expected_V * (1 - expected_V))
    assert (np.abs(counts_V - 4000 * expected_V) <= 5 * deviation_V).all()


AWKWARD = (
    "I'll  don't I'LL we'Re ITſ x's'T apples and 12345 6\u0663 pears\n\n",
    *("\ufeff1\u0085b\u2028c 👩‍👩‍👧", *texts_with_special(["<|endoftext|>", "<|im_start|>"], 40)),
)


def tokenizers() -> list[Tokenizer]:
    trained = train_vocabulary("bpe:300", 300, [FRUITS])
    special = {"<|endoftext|>": 300, "<|im_start|>": 301}
    others = [
        BpeTokenizer(name, trained.ranks, vocab_size=302, special=special, nfc=name == "qwen2")
        for name in ("cl100k_base", "o200k_base", "llama3", "qwen2", "smollm")
    ]
    return [ByteTokenizer(), trained, *others]


def test_ids_and_texts_equal_every_tokenizer(open_page: Any) -> None:
    models = [(small_model("multi-head", one.vocab_size), one) for one in tokenizers()]
    view = open_page(play_page([shown(one.name, model, one) for model, one in models]))
    for number, (model, tokenizer) in enumerate(models):
        encoded = [tokenizer.encode(text) for text in AWKWARD]
        script = "([n, texts]) => texts.map((text) => attnlm.models[n].encode(text))"
        assert view.evaluate(script, [number, AWKWARD]) == encoded, tokenizer.name
        script = "([n, all]) => all.map((ids) => attnlm.models[n].decode(ids))"
        parts = [*encoded, check_greedy(view, number, model), [255, 65], [240, 159, 145]]
        assert view.evaluate(script, [number, parts]) == list(map(tokenizer.decode, parts))


@pytest.mark.smoke
def test_typing_shows_the_next_token_and_what_the_last_one_attends_to(play: Any) -> None:
    seen = record(small_model("multi-head"), torch.tensor([LETTERS.encode("abcab")]))
    probabilities_V = seen.logits[0, -1].softmax(-1)
    view = play("multi-head", text="abcab")
    first = view.locator("#models li").first
    first.filter(has_text=LETTERS.decode([int(probabilities_V.argmax())])).wait_for()
    assert first.inner_text().split()[-1] == percent(float(probabilities_V.max()))
    view.locator("#thumbnails button").nth(1).click()
    caption = view.locator("#head-caption")
    caption.filter(has_text="Layer 1, head 2").wait_for()
    assert f"attends to {percent(float(seen.maps[0, 0, 1, 4].max()))}" in caption.inner_text()
    view.fill("#prompt", "abz")
    view.locator("#status", has_text="“z”").wait_for()  # which the vocabulary lacks
    assert view.locator("#models li").count() == 0 and view.inner_text("#after-text") == ""
    view.fill("#prompt", "ab")
    until(view, "document.getElementById('status').textContent === ''")
    first.wait_for()


SLOW = """() => {
  globalThis.updates = 0;
  attnlm.modelPage.showTexts = () => {
    globalThis.updates += 1;
    for (const began = performance.now(); performance.now() - began < 50;);
  };
}"""


def test_a_long_text_leaves_time_for_the_reader(play: Any) -> None:
    view = play("transformer", text="ab")
    view.evaluate(SLOW)
    view.fill("#tokens", "100000")
    view.click("#run")
    view.wait_for_timeout(1500)
    assert 1 <= view.evaluate("updates") <= 6  # 11 if each follows 80 ms after the one before
    view.click("#run")
    until(view, "!attnlm.modelPage.generation")


def test_a_head_that_is_switched_off_adds_nothing(play: Any) -> None:
    ids = LETTERS.encode("abcabca")
    with torch.inference_mode():
        seen = record(small_model("transformer").float(), torch.tensor([ids]), silence((1, 2)))
    expected_V = seen.logits[0, -1]
    asked = "(ids) => [...attnlm.models[0].logits(ids)]"
    view = play("transformer", text="abcabca")
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


def are_on_the_screen(view: Any, *parts: str) -> bool:
    """Return True if all elements of these selectors are in the 900 pixels of a desk."""
    boxes = [one.bounding_box() for part in parts for one in view.locator(part).all()]
    return len(boxes) >= len(parts) and all(
        box["y"] >= 0 and box["y"] + box["height"] <= 900 for box in boxes
    )


@pytest.mark.parametrize("count", [1, 4])
def test_the_switch_of_a_head_and_its_effect_fit_one_screen(count: int, play: Any) -> None:
    """The switch of a head, the bars, and the texts with and without it, from the same seed."""
    names = ("bigram", "average", "transformer", "multi-head")[-count:]
    view = play(*names, text="abcabca", **DESK)
    view.fill("#tokens", "40")
    view.click("#run")
    until(view, f"{SAMPLED} === {40 * count}")
    seed = view.evaluate("attnlm.modelPage.seed")
    view.locator("#thumbnails button", has_text="head 2").click()
    view.click("#switch")
    until(view, f"{SAMPLED} === {40 * (count + 1)}")
    until(view, f"{IDLE} && !attnlm.modelPage.generation")
    texts = view.locator(".shown .generated").all_text_contents()
    last = count - 1
    assert texts == [view.evaluate(GENERATED, [last, off, seed]) for off in ([], [[0, 1]])]
    assert texts[0] != texts[1]
    notes = view.locator(".shown .written .note").all_inner_texts()
    assert notes == [f"seed {seed}: all heads on", f"seed {seed}: head 2 off"]
    changed = (".shown .next", ".shown .change", ".shown .generated")
    assert are_on_the_screen(view, "#switch", "#run", *changed)
    assert view.evaluate("scrollY") == 0
    column = "document.querySelector('.act')"
    assert view.evaluate(f"{column}.scrollHeight <= {column}.clientHeight")
    # What was changed stays on the screen while the other column scrolls.
    view.evaluate("scrollTo(0, 1500)")
    assert are_on_the_screen(view, "#switch", ".shown .next", ".shown .generated >> nth=1")
    # `Start again` generates from the prompt, with the same seed.
    view.click("#again")
    until(view, f"{SAMPLED} === {40 * (count + 1)}")
    assert view.locator(".shown .generated").all_text_contents() == texts


def test_bars_describe_the_text_of_the_box(play: Any) -> None:
    view = play("average", text="abcab")
    bars = view.inner_text("#models .next")
    view.click("#run")
    until(view, f"{SAMPLED} === 200")
    until(view, IDLE)
    assert view.inner_text("#after-text") == "abcab"
    assert view.inner_text("#models .next") == bars
    view.fill("#seed", "3")
    view.click("#one")
    until(view, "document.querySelector('#prompt').value.length === 6")
    until(view, READ)
    text = view.input_value("#prompt")
    assert view.inner_text("#after-text") == text.replace("\n", "⏎")
    assert re.fullmatch("“.” had [0-9.]+%", view.inner_text("#drawn"))
    assert view.locator("#text button").count() == 6 and view.locator(".sampled").count() == 0


def test_the_table_of_a_bigram_equals_its_weights(play: Any) -> None:
    probabilities_VV = small_model("bigram").state_dict()["table.weight"].softmax(-1).numpy()
    view = play("bigram", text="abc")
    drawn = darkness(view, "#table canvas")
    assert drawn.shape == (V, V)
    assert np.corrcoef(drawn.ravel(), np.sqrt(probabilities_VV.ravel()))[0, 1] > 0.98
    likeliest = int(probabilities_VV[2].argmax())
    token = LETTERS.decode([likeliest]).replace("\n", "⏎")
    said = f"“{token}” after “c”: {percent(float(probabilities_VV[2, likeliest]))}, logit "
    assert view.inner_text("#table-cell").startswith(said)
    view.press("#table .picture", "ArrowUp")
    assert "after “b”" in view.inner_text("#table-cell")
    assert view.locator("#flow button").all_inner_texts() == ["logits", "probabilities"]
    assert view.is_hidden("#heads-body") and view.is_hidden("#switch")


STEPS = (
    *("embedding", "input", "q", "k", "v", "scores", "weights", "mix", "attention"),
    *("with attention", "MLP input", "hidden", "MLP", "after layer 1"),
)


@pytest.fixture(scope="module")
def walk(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An opened page of a transformer that has read "abcab"."""
    path = tmp_path_factory.mktemp("walk") / "page.html"
    path.write_bytes(play_page([shown("transformer")]))
    with opened(browser, path, **DESK) as view:
        view.fill("#prompt", "abcab")
        until(view, READ)
        yield view


def step_to(view: Any, name: str) -> float:
    """Choose a step; return the sum that the arithmetic of its number ends with."""
    view.locator("#flow button").nth(STEPS.index(name)).click()
    until(view, f"document.querySelector('#flow [aria-current]').textContent === '{name}'")
    return float(view.inner_text("#explanation .total").rpartition(" ")[2])


def terms(view: Any) -> list[list[float]]:
    """Return the numbers of each row of the arithmetic."""
    rows = view.locator(".arithmetic tbody tr").all()
    return [[float(x) for x in row.locator("td").all_inner_texts()] for row in rows]


def test_steps_lead_through_a_layer_with_their_arithmetic_nearby(walk: Any) -> None:
    assert walk.locator("#flow button").all_inner_texts() == list(STEPS)
    walk.locator("#flow button").first.click()
    for number, name in enumerate(STEPS, 1):
        assert walk.inner_text("#flow [aria-current]") == name
        assert walk.inner_text("#step-title").startswith(f"{number} of {len(STEPS)}: ")
        chosen, arithmetic = (
            walk.locator(part).bounding_box()["y"]
            for part in (".outcome .highlight", "#explanation")
        )
        assert 0 <= arithmetic - chosen < 300, name
        walk.click("#next-step")  # the last one leads to the next layer
    until(walk, f"attnlm.modelPage.headsView.layer === 1 && {IDLE}")
    assert walk.inner_text("#flow [aria-current]") == "after layer 1"
    assert walk.locator("#flow button").last.inner_text() == "probabilities"
    walk.locator("#thumbnails button").first.click()  # the first layer, for the other tests
    until(walk, f"attnlm.modelPage.headsView.layer === 0 && {IDLE}")


@pytest.mark.parametrize("name", ["q", "scores", "mix", "hidden"])
def test_the_products_of_a_step_sum_to_its_number(name: str, walk: Any) -> None:
    total = step_to(walk, name)
    products = []
    for x, y, product in terms(walk):
        assert product == pytest.approx(x * y, abs=0.006 * (1 + abs(x) + abs(y)))
        products.append(product)
    assert total == pytest.approx(sum(products), abs=0.01 * len(products))


def test_scores_and_weights_equal_the_model(walk: Any) -> None:
    seen = record(small_model("transformer"), torch.tensor([LETTERS.encode("abcab")]))
    step_to(walk, "scores")
    drawn = darkness(walk, ".outcome canvas")
    assert (np.nanmax(drawn, 1) == np.nanmax(drawn)).all()  # in each row
    past = np.tril_indices(5)
    scores = seen.maps[0, 0, 0].log()  # up to a number for each row
    below = (1 - (scores.amax(-1, keepdim=True) - scores) / 6).clamp(0, 1).numpy()
    assert np.corrcoef(drawn[past], below[past])[0, 1] > 0.95
    total = step_to(walk, "weights")
    powers, shares = zip(*(row[-2:] for row in terms(walk)), strict=True)
    assert total == pytest.approx(sum(powers), abs=0.05)
    assert shares == pytest.approx(seen.maps[0, 0, 0, 4].tolist(), abs=0.006)


WIDTHS = pytest.mark.parametrize("width", [1300, 400])


@WIDTHS
def test_the_controls_work_by_keyboard(width: int, play: Any) -> None:
    view = play("multi-head", text="", width=width)
    view.focus("#prompt")
    view.keyboard.type("abcab")
    view.locator("#text button").nth(4).wait_for()
    until(view, IDLE)
    view.press("#text button[tabindex='0']", "ArrowLeft")
    assert view.locator("#text button[aria-pressed='true']").all_inner_texts() == ["a"]
    view.press("#thumbnails [tabindex='0']", "ArrowRight")
    until(view, IDLE)
    assert "Layer 1, head 2: “a” attends to" in view.inner_text("#head-caption")
    view.press("#large .picture", "ArrowLeft")
    assert re.match("“a” gives [0-9.]+% to “c”", view.inner_text("#head-caption"))
    row, column = view.evaluate("attnlm.modelPage.walkthrough.cell")
    view.press(".outcome .matrix", "ArrowUp")
    said = f"embedding[“{'abcab'[row - 1]}”, {column + 1}] = "
    assert view.inner_text("#explanation").startswith(said)
    view.press("#next-step", "Enter")
    view.locator("#flow [aria-current]", has_text="q").wait_for()
    view.press("#tokens", "ControlOrMeta+a")
    view.keyboard.type("12")
    view.keyboard.press("Enter")
    until(view, f"{SAMPLED} === 12 && document.querySelector('#run').textContent === 'Generate'")
    until(view, IDLE)
    view.press("#one", "Enter")
    until(view, "document.querySelector('#prompt').value.length === 6")


@torch.no_grad()
def _score(text: str, *, head: int, query: int, key: int) -> float:
    """A score of the multi-head model, whose only layer reads the embedding."""
    model, ids = small_model("multi-head"), torch.tensor([LETTERS.encode(text)])
    attention, x = self_attention(model), activations(model, ids)[Site("stream", -1)][0]
    D = model.architecture.head_dim
    q_D, k_D = (
        linear(x[token]).view(-1, D)[head]
        for linear, token in ((attention.query, query), (attention.key, key))
    )
    score: float = (q_D @ k_D).item() / D**0.5
    return score


@WIDTHS
def test_clicks_choose_heads_and_numbers_and_hovering_shows_weights(width: int, play: Any) -> None:
    """A number of the scores is the product of a query and a key, which are framed."""
    view = play("multi-head", text="abcab", width=width)
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
    score = _score("abcab", head=2, query=4, key=1)
    assert view.inner_text("#explanation").startswith(f"scores[“b”, “b”] = {score:.2f}\n")
    assert view.locator("#walkthrough .highlight").count() == 3


TYPE_DURING_GENERATION = """async () => {
  document.querySelector("#run").click();
  const sampled = document.getElementsByClassName("sampled");
  while (sampled.length <= 100) await new Promise((resolve) => setTimeout(resolve));
  const prompt = document.querySelector("#prompt");
  prompt.value = "abc";
  prompt.dispatchEvent(new Event("input", {bubbles: true}));
}"""


def test_a_model_can_be_chosen_and_typing_stops_generation(play: Any) -> None:
    names = ("bigram", "multi-head", "transformer")
    view = play(*names, text="abcab")
    assert view.locator("#models h3").all_inner_texts() == list(names)
    for name, heads, has_stream in (("multi-head", 4, False), ("transformer", 8, True)):
        view.locator("#models h3 button", has_text=name).click()
        until(view, f"document.querySelector('#thumbnails').children.length === {heads}")
        until(view, IDLE)
        assert view.locator("#lens-section").is_visible() == has_stream
    assert view.locator("#lens tbody tr").count() == 3
    view.locator("#models h3 button", has_text="bigram").click()
    view.locator("#heads-title", has_text="no attention").wait_for()
    assert not view.is_visible("#thumbnails")
    view.locator("#table canvas").wait_for()
    view.fill("#tokens", "30")
    view.click("#run")
    until(view, f"{SAMPLED} === 90")
    view.fill("#tokens", "20000")
    view.evaluate(TYPE_DURING_GENERATION)
    until(view, f"document.querySelector('#run').textContent === 'Generate' && {IDLE}")
    assert view.locator(".sampled").count() == 0
    assert view.locator("#text button").all_inner_texts() == ["a", "b", "c"]


def test_a_hostile_tokenizer_shows_text_and_runs_nothing(open_page: Any) -> None:
    tokenizer = CharTokenizer("".join(dict.fromkeys("".join(HOSTILE) + "\n")))
    special = {text: 256 + i for i, text in enumerate(("</script>", "<img/onerror=alert(1)>"))}
    single_bytes = [bytes([byte]) for byte in range(256)]
    pairs = BpeTokenizer("cl100k_base", single_bytes, vocab_size=258, special=special)
    name = "</p></script><script>alert(1)</script><b>"  # also in what the page says of the model
    models = [
        shown(name, small_model("multi-head", tokenizer.vocab_size), tokenizer),
        shown("pairs", small_model("multi-head", pairs.vocab_size), pairs),
    ]
    view = open_page(play_page(models))
    view.fill("#prompt", "".join(HOSTILE[:5]))
    view.locator("#text button").nth(8).wait_for()
    view.fill("#tokens", "50")
    view.click("#run")
    until(view, f"{SAMPLED} === 100")
    until(view, IDLE)
    assert view.locator("img, b:not(.scale b)").count() == 0
    assert not set("\u2028\u2066\u202e\0") & set(view.locator("body").inner_text())


def test_the_play_page_fits_screens_and_paper(browser: Any, tmp_path: Path) -> None:
    models = [shown(name) for name in ("bigram", "multi-head", "transformer")]
    (tmp_path / "page.html").write_bytes(play_page(models, "abcabcabcabc"))
    check_fits(browser, tmp_path / "page.html", "play")


# --- Files ----------------------------------------------------------------------------------------


def test_a_page_is_little_larger_than_its_weights(gpt2: BpeTokenizer) -> None:
    """GPT-2's vocabulary takes 0.43 MB; with less than 13 numbers per token, its page is larger."""
    large = small_model("transformer", embed_dim=128, block_size=64, layers=4)
    small = small_model("multi-head", gpt2.vocab_size, embed_dim=16, block_size=64)
    for model, tokenizer, number_type, most in (
        (large, LETTERS, "f32", 1.4),
        (large, LETTERS, "f16", 0.7),
        (small, gpt2, None, 1.4),
    ):
        weights = sum(4 * parameter.numel() for parameter in model.parameters())
        page = play_page([shown("x", model, tokenizer, number_type)])
        assert len(page) <= most * weights + 150_000


@pytest.fixture(scope="module")
def checkpoints(trained: Path) -> tuple[object, ...]:
    return "--to", "html", "--checkpoint-dir", trained / "checkpoints"


def test_the_command_writes_runs_that_continue_texts_as_sample(
    trained: Path, checkpoints: tuple[object, ...], open_page: Any, tmp_path: Path
) -> None:
    done = command("export", "multi-head", "tied", "p.html", *checkpoints, "--json", cwd=tmp_path)
    run = attnlm.open_run("multi-head", checkpoint_dir=trained / "checkpoints")
    told = json.loads(done.stdout)
    assert told["output"] == "p.html" and told["form"].startswith("a page of ")
    assert told["checkpoint"] == "best" and told["parameters"] > run.parameters
    view = open_page(tmp_path / "p.html")
    assert view.evaluate("attnlm.models.map((model) => model.name)") == ["multi-head", "tied"]
    assert view.input_value("#prompt") == "".join(run.ticker_passage()) != ""
    made = view.evaluate(
        """async () => {
          const [model] = attnlm.models, ids = model.encode("the q");
          const made = await model.generate({ids, tokens: 100, temperature: 0});
          return model.decode([...ids, ...made]);
        }"""
    )
    text = attnlm.sample(run, tokens=100, prompt="the q", temperature=0, device="cpu")
    assert made == "".join(text)


ENLARGED = (
    *((".outcome .matrix", "height"), (".outcome .row-names", "fontSize"), (".scale", "fontSize")),
    *((".labelled .rows", "fontSize"), (".next", "fontSize"), (".scale span", "width")),
)


def test_the_command_takes_a_title_and_a_text(
    trained: Path, checkpoints: tuple[object, ...], open_page: Any, tmp_path: Path
) -> None:
    named = ("export", "multi-head", "p.html", "--title", "A <b>lesson", "--text", "the q")
    command(*named, *checkpoints, cwd=tmp_path)
    result = attnlm.open_run("multi-head", checkpoint_dir=trained / "checkpoints").result()
    assert result is not None
    view = open_page(tmp_path / "p.html")
    assert view.title() == view.inner_text("h1") == "A <b>lesson"
    assert view.input_value("#prompt") == "the q"
    assert f"trained on foxes to a loss of {result.best.val_loss:.2f}" in view.inner_text("summary")
    assert view.is_hidden("#about dl")
    view.click("summary")
    loss = f"{result.best.val_loss:.4f} nats per token"
    for fact in (loss, "30 of 30"):
        assert fact in view.inner_text("#about")
    view.click("#present")  # closes it, and enlarges cells, labels and legend
    assert view.is_hidden("#about dl")
    until(view, IDLE)
    size = "parseFloat(getComputedStyle(document.querySelector('%s')).%s)"
    large = [view.evaluate(size % part) for part in ENLARGED]
    view.evaluate("attnlm.modules['model_page.js'].present(false)")
    for part, before in zip(ENLARGED, large, strict=True):
        assert before > 1.3 * view.evaluate(size % part), part


def test_force_replaces_a_page_or_writes_a_large_one_but_follows_no_link(
    checkpoints: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.workflows.export._LARGEST_PAGE", 1000)
    tied = ("export", "tied", "x.html", *checkpoints)
    fails(*tied, cwd=tmp_path, code=1, says="too many for a page", hints="--force")
    (tmp_path / "x.html").write_text("mine")
    command(*tied, "--force", cwd=tmp_path)
    assert "unpackModels" in (tmp_path / "x.html").read_text(encoding="utf-8")
    page = (tmp_path / "x.html").read_bytes()
    (tmp_path / "link.html").symlink_to("x.html")
    command("export", "multi-head", "link.html", *checkpoints, "--force", cwd=tmp_path)
    assert not (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "x.html").read_bytes() == page


def test_a_weight_beyond_float16_is_refused() -> None:
    model = small_model("bigram").float()
    with torch.no_grad():
        next(model.parameters())[0, 0] = 1e5
    assert shown("x", model)["type"] == "f32"
    with pytest.raises(AttnlmError, match="weights too large for f16"):
        shown("x", model, number_type="f16")


# --- The pages in docs/gallery --------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_gallery_is_what_the_program_writes_of_its_model(name: str) -> None:
    page = FOLDER / f"{name}.html"
    data = data_of(page)
    assert page.read_bytes() == play_page(**data), "run `python docs/gallery.py --render`"
    assert page.stat().st_size < 600_000
    assert data["models"][0]["architecture"]["model"] == PAGES[name]["model"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_gallery_continues_a_text(name: str, open_page: Any) -> None:
    view = open_page(FOLDER / f"{name}.html")
    assert view.input_value("#prompt")
    view.locator("#models li").first.wait_for()
    made = view.evaluate(
        "attnlm.models[0].generate({ids: [0], tokens: 50, seed: 1})"
        ".then((ids) => attnlm.models[0].decode(ids))"
    )
    assert len(made) == 50


def test_the_answer_about_sure_and_unsure_places_in_the_lesson_holds(open_page: Any) -> None:
    """The page has the four heads that docs/teach.md trains."""
    script = """(text) => {
      const [model] = attnlm.models;
      const {nextProbabilities} = attnlm.modules["sampling.js"];
      return Math.max(...nextProbabilities(model.logits(model.encode(text))));
    }"""
    view = open_page(FOLDER / "multi-head.html")
    sure, unsure = (view.evaluate(script, text) for text in ("the bridg", "the "))
    assert (round(100 * sure), round(100 * unsure)) == (98, 16)
