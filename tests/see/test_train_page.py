"""Pages that train, held to PyTorch's gradients, to our optimizer, and to `attnlm import`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import attnlm
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import Bigram, Transformer
from attnlm.model.spec import UnsupportedError
from attnlm.see.model_page import architecture_data
from attnlm.see.train_page import (
    MOST_TEXT,
    parameters_data,
    render_train_page,
    train_page,
    training_text,
    unsupported,
)
from attnlm.text import corpus_tales
from attnlm.training.optimizer import Optimizer
from attnlm.training.schedule import learning_rate
from docs.gallery import TRAIN, data_of
from tests.browser import asks_for_nothing, check_fits, opened, until
from tests.kit import command, fails
from tests.models import V, gradients, prepared, small_model, some_ids, variants_where
from tests.tolerances import assert_near

TRAINED = variants_where(lambda spec: unsupported(spec) is None)
ALPHABET = "abcdefghij\n"
TEXT = {"name": "letters", "train": ALPHABET * 90, "validation": ALPHABET * 10, "floor": None}
B, T = 3, 13
SETTINGS: Settings = {"weight_decay": 0.1, "gradient_clip": 0.5, "warmup": 5, "steps": 40}
HAS_SNAPSHOT = "attnlm.trainers.every(({run}) => run.snapshots.length)"
NEW_MODEL = """() => { window.newModel = (architecture, weights, windows) => {
  for (const one of Object.values(weights)) one.values = Float32Array.from(one.values);
  const {BatchModel} = attnlm.modules["batch_model.js"];
  return new BatchModel({architecture, weights, windows});
}; }"""


@pytest.fixture(name="page", scope="module")
def a_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "page.html"
    path.write_bytes(train_page(TEXT))
    return path


@pytest.fixture(scope="module")
def view(browser: Any, page: Path) -> Iterator[Any]:
    """The opened page, for tests that call its functions."""
    with opened(browser, page) as opened_view:
        opened_view.evaluate(NEW_MODEL)
        yield opened_view


def described(model: Bigram | Transformer) -> list[Any]:
    """Return a model's architecture and weights, as arguments of newModel in the page."""
    weights = {
        name: {"shape": list(p.shape), "values": p.detach().flatten().tolist()}
        for name, p in model.named_parameters()
    }
    return [architecture_data(model.architecture), weights]


def batch(ids_BT: torch.Tensor) -> list[list[int]]:
    """Return the inputs and the targets of windows of ids, as arguments of `loss` in the page."""
    return [ids_BT[:, :-1].flatten().tolist(), ids_BT[:, 1:].flatten().tolist()]


def shaped(found: list[Any], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a page, pairs of name and numbers, in the shapes of `like`."""
    return {name: torch.tensor(numbers).view(like[name].shape) for name, numbers in found}


def settings_of(training: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(training).items() if isinstance(v, int | float | str)}


# --- Its parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("windows", [1, B])
def test_loss_and_gradients_equal_pytorch(windows: int, name: str, view: Any) -> None:
    """With several windows, the vocabulary and the positions have fewer rows than the batch."""
    model = small_model(name)
    ids = some_ids(windows, T + 1)
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    found_loss, found = view.evaluate(
        """([architecture, weights, windows, batch]) => {
             const model = newModel(architecture, weights, windows);
             model.loss(...batch); // the second call uses the memory of the first one again
             const loss = model.loss(...batch);
             model.backward();
             return [loss, Object.entries(model.weights)
               .map(([name, {gradient}]) => [name, [...gradient]])];
           }""",
        [*described(model), windows, batch(ids)],
    )
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    expected = gradients(model, loss)
    assert_near(shaped(found, expected), expected)


@pytest.mark.parametrize("name", RUNGS)
def test_twenty_updates_equal_our_optimizer(name: str, view: Any) -> None:
    model = small_model(name).float().train()
    arguments = described(model)
    settings: Settings = {"model": name, "optimizer": "adamw", "schedule": "cosine", **SETTINGS}
    training = resolve(settings).training
    ids = some_ids(20, B, T + 1)
    optimizer = Optimizer(model, training)
    losses = []
    for step, ids_BT in enumerate(ids):
        optimizer.gradient.zero_()
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()
        optimizer.update(step, learning_rate(step + 1, training))
        losses.append(loss.item())
    found_losses, found = view.evaluate(
        """([architecture, weights, training, windows, batches]) => {
             const {updateWeights} = attnlm.modules["optimizer.js"];
             const model = newModel(architecture, weights, windows);
             const losses = [];
             batches.forEach((batch, step) => {
               losses.push(model.loss(...batch));
               model.backward();
               updateWeights(model, step, training);
             });
             return [losses, Object.entries(model.weights)
               .map(([name, {values}]) => [name, [...values]])];
           }""",
        [*arguments, settings_of(training), B, [batch(ids_BT) for ids_BT in ids]],
    )
    np.testing.assert_allclose(found_losses, losses, rtol=1e-4)
    weights = dict(model.named_parameters())
    assert_near(shaped(found, weights), weights, within=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_initial_weights_have_the_distributions_of_pytorch(name: str, view: Any) -> None:
    a = small_model(name).architecture
    torch.manual_seed(1)
    expected = {n: p.detach().numpy() for n, p in a.build(V).named_parameters()}
    found = view.evaluate(
        """([parameters, V]) => {
             const {initialWeights} = attnlm.modules["initial_weights.js"];
             return Object.entries(initialWeights(parameters, V, 1))
               .map(([name, {shape, values}]) => [name, shape, [...values]]);
           }""",
        [parameters_data(a), V],
    )
    assert {n: tuple(shape) for n, shape, _ in found} == {n: p.shape for n, p in expected.items()}
    for parameter, _, values in found:
        numbers = expected[parameter]
        if numbers.std() == 0:  # zeros or ones
            assert set(values) == set(numbers.flatten().tolist()), parameter
        else:
            ratio = np.std(values) / numbers.std()
            assert abs(np.log(ratio)) < 8 / numbers.size**0.5, parameter


def test_an_epoch_uses_each_window_once(view: Any) -> None:
    starts = view.evaluate(
        """() => {
             const {Batches} = attnlm.modules["batches.js"];
             const batches = new Batches(new Uint16Array(107), 10, 3, 1);
             return Array.from({length: 27}, (_, n) => batches.start(n));
           }"""
    )
    for epoch in np.array(starts).reshape(3, 9):
        assert len({start % 10 for start in epoch}) == 1
        assert sorted(start // 10 for start in epoch) == list(range(9))
        assert max(epoch) + 11 <= 107


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_schedule_is_the_one_of_training(schedule: str, view: Any) -> None:
    settings: Settings = {"schedule": schedule, "cooldown": 0.5, "warmup": 3, "steps": 20}
    training = resolve({"model": "bigram", **settings}).training
    found = view.evaluate(
        """(training) => {
             const {learningRate} = attnlm.modules["optimizer.js"];
             return Array.from({length: 21}, (_, step) => learningRate(step, training));
           }""",
        settings_of(training),
    )
    assert found == pytest.approx([learning_rate(step, training) for step in range(21)])


def run(view: Any, script: str) -> Any:
    """Return the state after a call of the trainer."""
    return view.evaluate(f"attnlm.trainer.{script}.then(() => attnlm.trainer.state)")


def names(view: Any) -> Any:
    """Return the names of the models that compute in the page."""
    return view.evaluate("attnlm.models.map(({name}) => name)")


def test_the_same_seed_gives_the_same_steps_and_another_seed_others(view: Any) -> None:
    def losses(seed: int) -> list[float]:
        run(view, f"reset({{rung: 'single-head', seed: {seed}}})")
        return [run(view, "step()")["trainLoss"] for _ in range(3)]

    first = losses(1)
    assert first[0] == pytest.approx(np.log(V)) and losses(1) == first and losses(2) != first
    state = view.evaluate("attnlm.trainer.state")
    assert (state["rung"], state["step"], state["isRunning"]) == ("single-head", 3, False)


def test_the_counted_bigram_is_the_one_of_the_data_set(open_page: Any, tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    content = train_page(training_text(dataset))
    asks_for_nothing(content)
    view = open_page(content)
    lines = dict(view.evaluate("attnlm.trainPage.corpus.baselines"))
    assert lines["counted bigram"] == pytest.approx(dataset.bigram_loss, rel=1e-6)
    assert lines["uniform"] == pytest.approx(np.log(dataset.vocab_size))
    characters = view.evaluate("attnlm.trainPage.corpus.characters.join('')")
    assert characters == dataset.tokenizer.to_json()["characters"]


@pytest.fixture
def learned(open_page: Any, page: Path) -> Any:
    """An opened page that has learned the alphabet."""
    view = open_page(page)
    view.locator(".thumbnails .off, .inside canvas").first.wait_for()
    view.click("#train")
    until(view, "attnlm.trainer.state.validationLoss < 0.5")
    view.click("#train")
    until(view, "!attnlm.trainer.state.isRunning")
    until(view, "document.querySelector('#train').textContent === 'Train'")
    view.locator(".sample", has_text=ALPHABET.strip()).wait_for()
    return view


@pytest.mark.smoke
def test_the_slider_goes_back_to_the_beginning_and_everything_follows(learned: Any) -> None:
    assert learned.evaluate("attnlm.trainer.state.tokensPerSecond") > 0
    learned.press("#at-step", "Home")
    assert "step 0 ·" in learned.inner_text(".losses")
    assert learned.inner_text("#into-step") == "the model of step 0"
    until(learned, "!document.querySelector('.sample').textContent.includes('abcdefghij')")
    learned.keyboard.press("End")
    learned.locator(".sample", has_text="abcdefghij").wait_for()


NEWER = """() => {
  const {trainer} = attnlm;
  trainer.run.isRunning = true;
  trainer.run.snapshots.push({...trainer.run.snapshots[0], step: 7});
  trainer.show();
}"""


def test_what_comes_into_sight_is_the_newest_model(browser: Any, page: Path) -> None:
    with opened(browser, page, height=300) as view:
        until(view, f"{HAS_SNAPSHOT} && !attnlm.modelPage.isBusy")
        view.evaluate(NEWER)
        assert view.inner_text("#into-step") == "the model of step 0"
        view.locator("#models").scroll_into_view_if_needed()
        until(view, "document.getElementById('into-step').textContent === 'the model of step 7'")


LATE = """async () => {
  const {trainPage, trainer} = attnlm;
  const {cost} = trainer;
  const costs = [];
  trainer.worker.addEventListener("message", () => costs.push(trainer.cost));
  trainer.showHeads();
  trainPage.chooseStep(0);
  while (costs.length < 2) await new Promise((resolve) => setTimeout(resolve, 9));
  return [costs[0], cost];
}"""


def test_a_head_that_is_switched_off_costs_loss_at_its_step(learned: Any) -> None:
    learned.locator(".inside .thumbnails button").nth(1).click()
    learned.locator("[data-part=switch]", has_text="Switch head 2 off").click()
    learned.locator("[data-part=cost]", has_text="without head 2").wait_for()
    assert learned.evaluate("attnlm.trainer.cost") >= 0
    assert learned.evaluate("attnlm.trainer.model.isSilenced(0, 1)")
    # A loss that arrives late is compared with that of its own snapshot.
    late, cost = learned.evaluate(LATE)
    assert late == cost


def test_training_of_a_bigram_ends(open_page: Any, page: Path) -> None:
    view = open_page(page)
    view.select_option("[data-part=rung]", "bigram")
    view.evaluate("attnlm.trainPage.rungs.bigram.settings.steps = 2")
    view.click("#reset")
    until(view, "attnlm.trainer.state.step === 0")
    assert not view.is_visible("#train-end")
    view.click("#train")
    view.locator("#train-end", has_text="All steps are made").wait_for()
    assert view.is_disabled("#train")


def test_two_panes_train_on_the_same_batches(open_page: Any, page: Path) -> None:
    view = open_page(page)

    def losses_of_one_step() -> Any:
        until(view, HAS_SNAPSHOT)
        view.click("#one-step")
        until(view, "attnlm.trainers.every(({state}) => state.step === 1)")
        return view.evaluate("attnlm.trainers.map(({state}) => state.validationLoss)")

    view.click("#compare")
    until(view, "attnlm.trainers.length === 2")
    first, second = losses_of_one_step()
    assert first == second
    view.locator("[data-part=rate]").nth(1).fill("0.001")
    view.keyboard.press("Tab")
    until(view, "attnlm.trainers[1].state.step === 0")
    until(view, HAS_SNAPSHOT)
    view.evaluate("attnlm.trainers[0].reset()")
    first, second = losses_of_one_step()
    assert first < second < np.log(V)
    is_settled = view.evaluate(
        """() => {
             const answered = attnlm.trainers[1].step().then(() => true);
             attnlm.trainPage.compare();
             const late = new Promise((resolve) => setTimeout(() => resolve(false), 2000));
             return Promise.race([answered, late]);
           }"""
    )
    assert is_settled
    assert view.locator(".pane").count() == 1


def test_an_own_text_brings_its_vocabulary(open_page: Any, page: Path) -> None:
    view = open_page(page)
    view.click("summary:has-text('own text')")
    many = "".join(chr(0x4E00 + n) for n in range(1200))
    for text, says in (("short", "too short"), ("xyz" * 400, ""), (many, "1200 different")):
        view.fill("#own-text", text)
        view.click("#use-text")
        status = "document.querySelector('#train-status').textContent"
        until(view, f"{status}.includes({json.dumps(says)})")
    assert view.evaluate("attnlm.trainPage.corpus.V") == 3
    until(view, f"{HAS_SNAPSHOT} && attnlm.trainer.model.vocabSize === 3")
    file = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"ab" * 600}
    view.set_input_files("#own-file", file)
    until(view, "attnlm.trainPage.corpus.V === 2 && attnlm.trainPage.corpus.name === 'a.txt'")
    script = """(options) => {
      try { attnlm.trainer.reset(options); } catch (error) { return `${error.name} ${error}`; }
    }"""
    assert "too short" in view.evaluate(script, {"text": "no"})


def test_the_page_fits_screens_and_paper(browser: Any, page: Path) -> None:
    check_fits(browser, page, "train")


def test_a_pane_fits_one_screen_with_every_rung(open_page: Any, page: Path) -> None:
    view = open_page(page, width=1300)
    for rung in RUNGS:
        run(view, f"reset({{rung: '{rung}'}})")
        until(view, HAS_SNAPSHOT)
        box = view.locator("#trainer").bounding_box()
        assert box["y"] + box["height"] <= 900, rung
    view = open_page(page, width=1366, height=650)
    view.fill("#passage", (ALPHABET * 3)[:28])
    until(view, HAS_SNAPSHOT)
    view.locator("[data-part=switch]").click()
    until(view, "document.querySelector('#trainer [data-part=cost]').textContent")
    box = view.locator("[data-part=cost]").bounding_box()
    assert box["y"] + box["height"] <= 650


def test_the_page_in_the_gallery_trains_on_tales(open_page: Any) -> None:
    data = data_of(TRAIN)
    asks_for_nothing(TRAIN.read_bytes())
    assert TRAIN.read_bytes() == render_train_page(data), "run `python docs/gallery.py --render`"
    text = data["training"]["text"]
    whole = (text["train"] + text["validation"]).encode()
    assert hashlib.sha256(whole).hexdigest() == corpus_tales.SHA256
    view = open_page(TRAIN)
    lines = dict(view.evaluate("attnlm.trainPage.corpus.baselines"))
    assert [f"{loss:.3f}" for loss in lines.values()] == ["4.060", "2.178", "0.131"]
    assert run(view, "step()")["validationLoss"] < np.log(58)


# --- Files ----------------------------------------------------------------------------------------


def test_a_saved_model_becomes_a_run_and_a_saved_page_holds_it(
    open_page: Any, page: Path, tmp_path: Path
) -> None:
    view = open_page(page)
    ids = [1, 2, 3, 4]
    for rung in ("bigram", "transformer"):
        run(view, f"reset({{rung: '{rung}', seed: 3}})")
        for _ in range(3):
            run(view, "step()")
        logits_V = view.evaluate(f"[...attnlm.trainer.model.logits({ids})]")
        for button, file in (("[data-part=save]", f"{rung}.safetensors"), ("#save-page", "p.html")):
            with view.expect_download() as saved:
                view.click(button)
            saved.value.save_as(tmp_path / file)
        command("import", f"{rung}.safetensors", "--name", rung, cwd=tmp_path)
        imported = attnlm.open_run(rung, checkpoint_dir=tmp_path / "checkpoints")
        assert imported.config.training.seed == 3 and imported.checkpoint().step == 3
        with torch.inference_mode():
            expected = attnlm.load_model(imported, device="cpu")[0](torch.tensor([ids]))[0, -1]
        assert_near(torch.tensor(logits_V), expected)
        assert imported.tokenizer.decode(imported.tokenizer.encode(ALPHABET)) == ALPHABET
        again = open_page(tmp_path / "p.html")
        assert names(again) == [f"{rung}, step 3", "trained here"]
        assert again.evaluate(f"[...attnlm.models[0].logits({ids})]") == logits_V
        assert run(again, "step()")["rung"] == rung


ABOUT = {"settings": {"model": "bigram", "steps": 9}, "characters": "ab", "step": 1, "text": "t"}


@pytest.mark.parametrize(
    ("shape", "number", "changed", "says"),
    [
        ((2, 3), 0.0, {}, "its tensors are not those"),
        ((2, 2), torch.nan, {}, "NaN"),
        ((2, 2), 0.0, {"step": -1}, "'step' cannot be -1"),
        ((2, 2), 0.0, {"settings": {"model": "bigrm"}}, "in the recipe"),
        ((2, 2), 0.0, {"settings": {"model": "a.py:B"}}, "in the recipe"),
    ],
)
def test_a_damaged_model_of_a_page_is_refused(
    shape: tuple[int, ...], number: float, changed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    metadata = {"attnlm": json.dumps({**ABOUT, **changed})}
    tensors = {"table.weight": torch.full(shape, number)}
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    fails("import", "model.safetensors", cwd=tmp_path, code=1, says=says, hints="")
    assert not (tmp_path / "checkpoints" / "bigram-001").exists()


def test_the_block_size_of_a_model_of_a_page_is_its_own(tmp_path: Path) -> None:
    metadata = {"attnlm": json.dumps(ABOUT)}
    save_file({"table.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata)
    how = ("import", "model.safetensors", "--block-size", "4")
    fails(*how, cwd=tmp_path, code=2, says="--block-size", hints="")
    command("import", "model.safetensors", cwd=tmp_path)


def test_the_command_adds_a_trainer(trained: Path, open_page: Any, tmp_path: Path) -> None:
    places = ("--checkpoint-dir", trained / "checkpoints", "--data-dir", trained / "data")
    how = ("--train", "--to", "html", *places)
    command("export", "transformer", "run.html", *how, cwd=tmp_path)
    view = open_page(tmp_path / "run.html")
    assert names(view) == ["transformer", "trained here"]
    until(view, "attnlm.trainer.model")
    assert view.evaluate("attnlm.trainer.model.architecture.embed_dim") == 16
    assert run(view, "step()")["rung"] == "transformer"
    command("export", "data.html", "foxes", *how, cwd=tmp_path)
    view = open_page(tmp_path / "data.html")
    assert names(view) == ["trained here"]
    assert run(view, "step()")["rung"] == "multi-head"
    assert view.evaluate("attnlm.trainPage.corpus.name") == "foxes"


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    notes: list[Any] = []
    text = training_text(prepared(tmp_path, "aé漢\n" * 200_000), notes.append)
    assert len(text["train"].encode()) + len(text["validation"].encode()) <= MOST_TEXT
    assert len(text["train"].encode()) > 0.89 * MOST_TEXT and text["floor"] is None
    assert [str(note) for note in notes] == ["the page has the first 1.05 MB of fruits-char"]


def test_a_model_with_unknown_parts_is_refused() -> None:
    spec = resolve({"model": "gpt2", "dropout": 0.1}).spec
    with pytest.raises(UnsupportedError, match="training in a page: it needs RMS norm"):
        train_page(TEXT, [], spec)
