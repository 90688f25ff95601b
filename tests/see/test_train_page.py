"""Pages that train, held to PyTorch's gradients, to our optimizer, and to `attnlm import`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.model.architecture import RUNGS, UnsupportedError
from attnlm.model.language_model import Bigram, Transformer
from attnlm.model.spec import Use
from attnlm.see.model_page import architecture_data
from attnlm.see.train_page import (
    MOST_TEXT,
    parameters_data,
    render_train_page,
    train_page,
    training_text,
)
from attnlm.text import corpus_tales
from attnlm.training.learning_rate import learning_rate
from attnlm.training.optimizer import Optimizer
from docs.gallery import TRAIN, data_of
from tests.browser import asks_for_nothing, check_fits, opened, until
from tests.kit import command, fails
from tests.models import V, gradients, prepared, small_model, some_ids, variants_with
from tests.tolerances import assert_near

TRAINED = variants_with(Use.PAGE_TRAINING)
ALPHABET = "abcdefghij\n"
TEXT = {"name": "letters", "train": ALPHABET * 90, "validation": ALPHABET * 10, "floor": None}
B, T = 3, 13
SETTINGS: Settings = {"weight_decay": 0.1, "gradient_clip": 0.5, "warmup": 5, "schedule": "cosine"}


@pytest.fixture(name="page", scope="module")
def a_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "page.html"
    path.write_bytes(train_page(TEXT))
    return path


@pytest.fixture(scope="module")
def view(browser: Any, page: Path) -> Iterator[Any]:
    with opened(browser, page, viewport={"width": 1300, "height": 900}) as opened_view:
        opened_view.evaluate(
            """() => { window.newModel = (architecture, weights, windows) => {
                 for (const one of Object.values(weights))
                   one.values = Float32Array.from(one.values);
                 const {BatchModel} = attnlm.modules["batch_model.js"];
                 return new BatchModel({architecture, weights, windows});
               }; }"""
        )
        yield opened_view


def described(model: Bigram | Transformer) -> list[Any]:
    """Return a model's architecture and weights, as arguments of newModel in the page."""
    weights = {
        name: {"shape": list(p.shape), "values": p.detach().flatten().tolist()}
        for name, p in model.named_parameters()
    }
    return [architecture_data(model.architecture), weights]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("windows", [1, B])
def test_loss_and_gradients_equal_pytorch(windows: int, name: str, view: Any) -> None:
    """With several windows, the vocabulary and the positions have fewer rows than the batch."""
    model = small_model(name)
    ids = some_ids(windows, T + 1)
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    found = view.evaluate(
        """([architecture, weights, windows, inputs, targets]) => {
             const model = newModel(architecture, weights, windows);
             model.loss(inputs, targets); // the second call uses the memory of the first one again
             const loss = model.loss(inputs, targets);
             model.backward();
             return [loss, Object.entries(model.weights)
               .map(([name, {gradient}]) => [name, [...gradient]])];
           }""",
        [*described(model), windows, ids[:, :-1].flatten().tolist(), ids[:, 1:].flatten().tolist()],
    )
    assert found[0] == pytest.approx(loss.item(), rel=1e-6)
    expected = gradients(model, loss)
    shaped = {n: torch.tensor(g).view(expected[n].shape) for n, g in found[1]}
    assert_near(shaped, expected)


@pytest.mark.parametrize("name", RUNGS)
def test_twenty_updates_equal_our_optimizer(name: str, view: Any) -> None:
    model = small_model(name).float().train()
    arguments = described(model)
    config = resolve({"model": name, "optimizer": "adamw", **SETTINGS, "steps": 40})
    ids = some_ids(20, B, T + 1)
    optimizer = Optimizer(model, config.training)
    losses = []
    for step, ids_BT in enumerate(ids):
        optimizer.gradient.zero_()
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        loss.backward()
        optimizer.update(step)
        losses.append(loss.item())
    found = view.evaluate(
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
        [
            *arguments,
            {k: v for k, v in vars(config.training).items() if isinstance(v, int | float | str)},
            B,
            [[x[:, :-1].flatten().tolist(), x[:, 1:].flatten().tolist()] for x in ids],
        ],
    )
    np.testing.assert_allclose(found[0], losses, rtol=1e-4)
    named = dict(model.named_parameters())
    weights = {n: torch.tensor(values).view(named[n].shape) for n, values in found[1]}
    assert_near(weights, named, within=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_initial_weights_have_the_distributions_of_pytorch(name: str, view: Any) -> None:
    model = small_model(name)
    torch.manual_seed(1)
    fresh = model.architecture.build(V)
    found = view.evaluate(
        """([parameters, V]) => {
             const {initialWeights} = attnlm.modules["initial_weights.js"];
             return Object.entries(initialWeights(parameters, V, 1))
               .map(([name, {shape, values}]) => [name, shape, [...values]]);
           }""",
        [parameters_data(model.architecture), V],
    )
    named = {n: p.detach().numpy() for n, p in fresh.named_parameters()}
    assert {n: tuple(shape) for n, shape, _ in found} == {n: p.shape for n, p in named.items()}
    for parameter, _, values in found:
        expected = named[parameter]
        if expected.std() == 0:  # zeros or ones
            assert set(values) == set(expected.flatten().tolist()), parameter
        else:
            ratio = np.std(values) / expected.std()
            assert abs(np.log(ratio)) < 8 / expected.size**0.5, parameter


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


def test_the_schedule_is_the_one_of_training(view: Any) -> None:
    for schedule in ("constant", "linear", "cosine"):
        settings = {"schedule": schedule, "cooldown": 0.5, "warmup": 3, "steps": 20}
        training = resolve({"model": "bigram", **settings}).training
        found = view.evaluate(
            """(training) => {
                 const {learningRate} = attnlm.modules["optimizer.js"];
                 return Array.from({length: 21}, (_, step) => learningRate(step, training));
               }""",
            {k: v for k, v in vars(training).items() if isinstance(v, int | float | str)},
        )
        assert found == pytest.approx([learning_rate(step, training) for step in range(21)])


def test_the_counted_bigram_is_the_one_of_the_data_set(browser: Any, tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    text = training_text(dataset)
    page = tmp_path / "page.html"
    page.write_bytes(train_page(text))
    asks_for_nothing(page.read_bytes())
    with opened(browser, page) as view:
        lines = dict(view.evaluate("attnlm.trainPage.corpus.baselines"))
        assert lines["counted bigram"] == pytest.approx(dataset.bigram_loss, rel=1e-6)
        assert lines["uniform"] == pytest.approx(np.log(dataset.vocab_size))
        characters = view.evaluate("attnlm.trainPage.corpus.characters.join('')")
        assert characters == dataset.tokenizer.to_json()["characters"]


def test_training_shows_loss_sample_and_maps(browser: Any, page: Path) -> None:
    with opened(browser, page, viewport={"width": 1300, "height": 900}) as view:
        view.locator(".thumbnails .off, .inside canvas").first.wait_for()
        view.click("#train")
        until(view, "attnlm.trainer.state.validationLoss < 0.5")
        view.click("#train")
        until(view, "!attnlm.trainer.state.isRunning")
        until(view, "document.querySelector('#train').textContent === 'Train'")
        view.locator(".sample", has_text="abcdefghij").wait_for()
        assert view.evaluate("attnlm.trainer.state.tokensPerSecond") > 0
        # The slider goes back to the beginning, and everything follows.
        view.focus("#at-step")
        view.keyboard.press("Home")
        assert "step 0 ·" in view.inner_text(".losses")
        assert view.inner_text("#into-step") == "the model of step 0"
        until(view, "!document.querySelector('.sample').textContent.includes('abcdefghij')")
        view.keyboard.press("End")
        view.locator(".sample", has_text="abcdefghij").wait_for()
        # A head that is switched off costs something.
        view.locator(".inside .thumbnails button").nth(1).click()
        view.locator("[data-part=switch]", has_text="Switch head 2 off").click()
        view.locator("[data-part=cost]", has_text="without head 2").wait_for()
        assert view.evaluate("attnlm.trainer.cost") >= 0
        assert view.evaluate("attnlm.trainer.model.isSilenced(0, 1)")
        assert view.locator("[data-part=next] .before").count() > 0
        # A loss that arrives late is compared with that of its own snapshot.
        late, cost = view.evaluate(
            """async () => {
                 const {trainPage, trainer} = attnlm;
                 const {cost} = trainer;
                 const costs = [];
                 trainer.worker.addEventListener("message", () => costs.push(trainer.cost));
                 trainer.showHeads();
                 trainPage.chooseStep(0);
                 while (costs.length < 2) await new Promise((resolve) => setTimeout(resolve, 9));
                 return [costs[0], cost];
               }"""
        )
        assert late == cost
        view.select_option("[data-part=rung]", "bigram")
        view.locator(".tables figure").nth(1).wait_for()
        assert "not seen" not in view.inner_text(".tables")
        view.evaluate("attnlm.trainPage.rungs.bigram.training.steps = 2")
        view.click("#reset")
        until(view, "attnlm.trainer.state.step === 0")
        assert not view.is_visible("#train-end")
        view.click("#train")
        view.locator("#train-end", has_text="All steps are made").wait_for()
        assert view.is_disabled("#train")


def test_two_panes_train_on_the_same_batches(browser: Any, page: Path) -> None:
    with opened(browser, page, viewport={"width": 1300, "height": 900}) as view:
        view.click("#compare")
        until(view, "attnlm.trainers.length === 2")
        until(view, "attnlm.trainers.every(({run}) => run.snapshots.length)")
        view.click("#one-step")
        until(view, "attnlm.trainers.every(({state}) => state.step === 1)")
        first, second = view.evaluate("attnlm.trainers.map(({state}) => state.validationLoss)")
        assert first == second
        view.locator("[data-part=rate]").nth(1).fill("0.001")
        view.keyboard.press("Tab")
        until(view, "attnlm.trainers[1].state.step === 0")
        until(view, "attnlm.trainers[1].run.snapshots.length")
        view.evaluate("attnlm.trainers[0].reset()")
        view.click("#one-step")
        until(view, "attnlm.trainers.every(({state}) => state.step === 1)")
        first, second = view.evaluate("attnlm.trainers.map(({state}) => state.validationLoss)")
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


def test_an_own_text_brings_its_vocabulary(browser: Any, page: Path) -> None:
    with opened(browser, page) as view:
        view.click("summary:has-text('own text')")
        for text, says in (
            ("short", "too short"),
            ("xyz" * 400, ""),
            (words(1200), "1200 different"),
        ):
            view.fill("#own-text", text)
            view.click("#use-text")
            status = "document.querySelector('#train-status').textContent"
            until(view, f"{status}.includes({json.dumps(says)})")
        assert view.evaluate("attnlm.trainPage.corpus.V") == 3
        until(view, "attnlm.trainer.run.snapshots.length && attnlm.trainer.model.vocabSize === 3")
        view.set_input_files(
            "#own-file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"ab" * 600}
        )
        until(view, "attnlm.trainPage.corpus.V === 2 && attnlm.trainPage.corpus.name === 'a.txt'")
        script = """(options) => {
          try { attnlm.trainer.reset(options); } catch (error) { return `${error.name} ${error}`; }
        }"""
        assert "too short" in view.evaluate(script, {"text": "no"})


def words(count: int) -> str:
    """Return a text of `count` different characters."""
    return "".join(chr(0x4E00 + n) for n in range(count))


def test_a_saved_model_becomes_a_run_and_a_saved_page_holds_it(
    browser: Any, page: Path, tmp_path: Path
) -> None:
    ids = [1, 2, 3, 4]
    for rung in ("bigram", "multi-head", "transformer"):
        with opened(browser, page) as view:
            run(view, f"reset({{rung: '{rung}', seed: 3}})")
            for _ in range(3):
                run(view, "step()")
            logits_V = view.evaluate(f"[...attnlm.trainer.model.logits({ids})]")
            with view.expect_download() as saved:
                view.click("[data-part=save]")
            saved.value.save_as(tmp_path / f"{rung}.safetensors")
            with view.expect_download() as saved:
                view.click("#save-page")
            saved.value.save_as(tmp_path / f"{rung}.html")
        how = ("--checkpoint-dir", tmp_path / "checkpoints", "--name", rung)
        command("import", f"{rung}.safetensors", *how, cwd=tmp_path)
        imported = attnlm.open_run(rung, checkpoint_dir=tmp_path / "checkpoints")
        assert imported.config.training.seed == 3 and imported.checkpoint().step == 3
        with torch.inference_mode():
            expected = imported.model()(torch.tensor([ids]))[0, -1]
        assert_near(torch.tensor(logits_V), expected)
        assert imported.tokenizer.decode(imported.tokenizer.encode(ALPHABET)) == ALPHABET
        with opened(browser, tmp_path / f"{rung}.html") as view:
            assert names(view) == [f"{rung}, step 3", "trained here"]
            assert view.evaluate(f"[...attnlm.models[0].logits({ids})]") == logits_V
            assert run(view, "step()")["rung"] == rung


def test_a_damaged_model_of_a_page_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    about = {
        "settings": {"model": "bigram", "steps": 9},
        "characters": "ab",
        "step": 1,
        "text": "t",
    }
    tensors = {"table.weight": torch.zeros(2, 2)}

    def refused(says: str, tensors: dict[str, torch.Tensor] = tensors, **changed: Any) -> None:
        metadata = {"attnlm": json.dumps({**about, **changed})}
        save_file(tensors, tmp_path / "model.safetensors", metadata)
        fails("import", "model.safetensors", cwd=tmp_path, code=1, says=says, hints="")
        assert not (tmp_path / "checkpoints" / "bigram-001").exists()

    refused("its tensors are not those", {"table.weight": torch.zeros(2, 3)})
    refused("NaN", {"table.weight": torch.full((2, 2), torch.nan)})
    refused("'step' cannot be -1", step=-1)
    refused("in the recipe", settings={"model": "bigrm"})
    refused("in the recipe", settings={"model": "a.py:B"})
    save_file(tensors, tmp_path / "model.safetensors", {"attnlm": json.dumps(about)})
    how = ("--block-size", "4")
    fails("import", "model.safetensors", *how, cwd=tmp_path, code=2, says="--block-size", hints="")
    command("import", "model.safetensors", cwd=tmp_path)


def test_the_command_adds_a_trainer(trained: Path, browser: Any, tmp_path: Path) -> None:
    places = ("--checkpoint-dir", trained / "checkpoints", "--data-dir", trained / "data")
    how = ("--to", "html", *places)
    command("export", "transformer", "run.html", "--train", *how, cwd=tmp_path)
    with opened(browser, tmp_path / "run.html") as view:
        assert names(view) == ["transformer", "trained here"]
        assert view.evaluate("attnlm.trainer.model.architecture.embed_dim") == 16
        assert run(view, "step()")["rung"] == "transformer"
    command("export", "data.html", "foxes", "--train", *how, cwd=tmp_path)
    with opened(browser, tmp_path / "data.html") as view:
        assert names(view) == ["trained here"]
        assert run(view, "step()")["rung"] == "multi-head"
        assert view.evaluate("attnlm.trainPage.corpus.name") == "foxes"

    def refused(*words: str, code: int, says: str) -> None:
        fails("export", *words, *places, cwd=tmp_path, code=code, says=says, hints="")

    refused("multi-head", "out", "--train", code=2, says="--train")
    refused("x.html", "foxs", "--train", "--to", "html", code=1, says="foxs")
    refused("data.html", "foxes", "--train", "--to", "html", code=1, says="already exists")


def test_a_long_text_is_cut_and_a_model_with_unknown_parts_is_refused(tmp_path: Path) -> None:
    notes: list[Any] = []
    dataset = prepared(tmp_path, "aé漢\n" * 200_000)
    text = training_text(dataset, notes.append)
    assert len(text["train"].encode()) + len(text["validation"].encode()) <= MOST_TEXT
    assert len(text["train"].encode()) > 0.89 * MOST_TEXT and text["floor"] is None
    assert [str(note) for note in notes] == ["the page has the first 1.05 MB of fruits-char"]
    spec = resolve({"model": "gpt2", "dropout": 0.1}).spec
    with pytest.raises(UnsupportedError, match="training in a page: it needs RMS norm"):
        train_page(TEXT, [], spec)


def test_the_page_fits_screens_and_paper(browser: Any, page: Path) -> None:
    check_fits(browser, page, "train")
    with opened(browser, page, viewport={"width": 1300, "height": 900}) as view:
        for rung in RUNGS:
            run(view, f"reset({{rung: '{rung}'}})")
            until(view, "document.querySelector('.tables canvas, .inside canvas')")
            box = "document.querySelector('#trainer').getBoundingClientRect()"
            bottom = view.evaluate(f"{box}.bottom")
            assert bottom <= 900, rung
    with opened(browser, page, viewport={"width": 1366, "height": 650}) as view:
        view.fill("#passage", (ALPHABET * 3)[:28])
        until(view, "document.querySelector('#trainer .next-tokens li')")
        view.locator("[data-part=switch]").click()
        until(view, "document.querySelector('#trainer [data-part=cost]').textContent")
        box = view.locator("[data-part=next]").bounding_box()
        assert box["y"] + box["height"] <= 650


def test_the_page_in_the_gallery_trains_on_tales(browser: Any) -> None:
    assert TRAIN.read_bytes() == render_train_page(data_of(TRAIN)), (
        "run `python docs/gallery.py --render`"
    )
    asks_for_nothing(TRAIN.read_bytes())
    text = data_of(TRAIN)["training"]["text"]
    whole = (text["train"] + text["validation"]).encode()
    assert hashlib.sha256(whole).hexdigest() == corpus_tales.SHA256
    with opened(browser, TRAIN) as view:
        lines = dict(view.evaluate("attnlm.trainPage.corpus.baselines"))
        assert [f"{loss:.3f}" for loss in lines.values()] == ["4.060", "2.178", "0.131"]
        assert run(view, "step()")["validationLoss"] < np.log(58)
