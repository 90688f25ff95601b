"""The report of a run: what it gathers, the commands that make it again, its page in a browser."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm import Report, open_run
from attnlm.model.architecture import RUNGS
from attnlm.runs.journal import Snapshot
from attnlm.runs.run import Run
from attnlm.see.attend import CAUTION
from attnlm.see.report import report
from attnlm.see.reproduce import prepare_command
from attnlm.see.shown_tokens import visible
from tests.browser import asks_for_nothing, check_fits, darkness, elements, until
from tests.kit import command, fails, quick_run
from tests.models import attention_like, timeless

TEXT = "the quick fox"


@pytest.fixture(name="runs", scope="module")
def copied_runs(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the trained runs, in a copy."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return folder / "checkpoints"


@pytest.fixture(name="found", scope="module")
def a_report(runs: Path) -> Report:
    return of("transformer", runs, windows=4, ablate=True)


@pytest.fixture(name="page", scope="module")
def a_page(found: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return found.write_page(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(name="view")
def an_opened_page(page: Path, open_page: Any) -> Any:
    return open_page(page)


def of(name: str, runs: Path, **how: Any) -> Report:
    return report(open_run(name, checkpoint_dir=runs), device="cpu", **how)


def html(found: Report) -> str:
    return found.page().decode()


def data_of(content: bytes) -> Any:
    return json.loads(elements(content).scripts[0])


# --- What it gathers ------------------------------------------------------------------------------


def test_a_report_contains_the_results_of_the_single_commands(runs: Path) -> None:
    run = open_run("transformer", checkpoint_dir=runs)
    found = report(run, text=TEXT, windows=3, device="cpu")
    assert found.text == TEXT and found.attention is None and len(found.models) == 1
    assert found.heads == attnlm.heads(run, windows=3, device="cpu")
    assert found.result is not None
    losses = [record["val_loss"] for record in run.metrics()]
    assert found.result.best.val_loss == found.facts()["val_loss"] == min(losses)
    assert found.not_measured == ""


def test_the_default_text_is_the_validation_split(runs: Path, trained: Path) -> None:
    found = of("multi-head", runs, checkpoint="last")
    val = attnlm.open_dataset(trained / "data" / "foxes").val[:16].tolist()
    assert found.text == found.run.tokenizer.decode(val)
    assert "The last checkpoint computes in this page" in html(found)
    with pytest.raises(attnlm.AttnlmError, match="`checkpoint`"):
        of("multi-head", runs, checkpoint="worst")


@pytest.mark.parametrize("rung", [*RUNGS, "projected", "tied"])
def test_every_rung_has_a_page_with_its_model(rung: str, runs: Path) -> None:
    found = of(rung, runs)
    page = html(found)
    assert found.result is not None
    assert f"{found.result.best.val_loss:.4f}" in page and found.verdict[1:] in page
    assert [model["name"] for model in data_of(page.encode())["models"]] == [rung]
    for words in ("A head forming", "uniform attention"):
        assert (words in page) == (rung != "bigram")
    assert "loss without it" not in page and CAUTION not in page
    for words in found.commands:
        assert words in elements(page.encode()).text
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_missing_data_sets_and_snapshots_are_reported(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "transformer", tmp_path / "transformer")
    run = open_run(tmp_path / "transformer")
    run = replace(run, dataset=replace(run.dataset, path=str(tmp_path / "nowhere" / "foxes")))
    run.save_config()
    found = report(run)
    assert found.heads is None and "data set of transformer is gone" in found.not_measured
    assert found.text == "".join(run.ticker_passage())
    words = elements(found.page()).text
    assert "Not measured: the data set" in words
    assert len(found.commands) == 1 and found.commands[0].startswith("attnlm train")
    (run.path / "ticker.jsonl").unlink()
    alone = report(run)
    assert alone.text == "" and alone.models
    page = html(alone)
    assert "There is no record of what the model generated during training" in page
    assert 'id="curve"' in page and 'id="snapshot"' not in page
    (run.path / "metrics.jsonl").unlink()
    missing = {"says": "no evaluations", "hints": "--resume"}
    fails("report", run.path, cwd=tmp_path, code=1, **missing)
    assert not list(tmp_path.rglob("*.html"))


def test_an_imported_run_has_a_report_without_training(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "transformer", tmp_path / "theirs")
    for name in ("metrics.jsonl", "ticker.jsonl"):
        (tmp_path / "theirs" / name).unlink()
    run = replace(open_run(tmp_path / "theirs"), imported_from="a/folder")
    found = report(run, windows=2)
    assert found.result is None and found.text == ""
    assert found.heads is not None and "(" not in found.heads.measured_on
    assert found.commands == [f"attnlm import a/folder --name theirs --checkpoint-dir {tmp_path}"]
    page = html(found)
    for words in ("Try it", "Heads by measurement", "imported from"):
        assert words in page
    for words in ("While it learned", "best loss", "SHA-256", "learning rate"):
        assert words not in page


def typed(words: str) -> str:
    return command(*shlex.split(words)[1:], cwd=Path.cwd()).stdout


def test_the_command_writes_the_report(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    done = command("report", "tied", "--text", "the fox", cwd=Path.cwd())
    assert done.stdout == "checkpoints/tied/report.html\n"
    page = (runs / "tied" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    out = tmp_path / "page.html"
    facts = json.loads(typed(f"attnlm report bigram --json -o {shlex.quote(str(out))}"))
    assert facts["output"] == str(out) and out.is_file() and facts["heads"] == []
    assert facts["commands"][1].startswith("attnlm train foxes --recipe checkpoints/bigram/config")


@pytest.mark.parametrize("rung", ["bigram", "transformer", "projected", "drawn"])
def test_the_commands_of_a_report_reproduce_the_run(
    rung: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has nothing but the text and the run."""
    (tmp_path / "text.txt").write_bytes((trained / "text.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    dataset = attnlm.prepare("text.txt", name="foxes", val_fraction=0.2)
    settings: dict[str, Any] = {"sampling": "random", "gradient_clip": 1.5, "steps": 4}
    if rung == "drawn":  # a seed that nobody gave, a schedule of its own, early stopping
        settings |= {"model": "multi-head", "schedule": "cosine", "warmup": 2, "patience": 3}
        settings |= {"threads": 1, "block_size": 8}
    else:
        old = open_run(rung, checkpoint_dir=trained / "checkpoints").config.settings()
        settings = {**old, **settings}
    original = attnlm.train(dataset.path, **settings)
    found = report(original, windows=1)
    shutil.rmtree("data")
    for words in found.commands:
        typed(words)
    again = open_run(None)
    assert again.name != original.name
    assert again.config.settings() == original.config.settings()
    assert replace(again.dataset, path="") == replace(original.dataset, path="")
    assert timeless(again.path) == timeless(original.path)


def test_the_prepare_command_reproduces_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b c.txt").write_bytes(("Größe und Maß.\r\n" * 60).encode("latin-1"))
    Path("a.txt").write_bytes(b"the first\r" * 9)
    Path("val.txt").write_bytes(("Maß und Größe. " * 9).encode("latin-1"))
    how: dict[str, Any] = {"encoding": "latin-1", "val_file": "val.txt", "data_dir": "else where"}
    dataset = attnlm.prepare(["b c.txt", "a.txt"], tokenizer="bpe:260", **how)
    run = attnlm.train(dataset.path, model="bigram", steps=1, block_size=4, seed=1, threads=1)
    commands = report(run).commands
    shutil.rmtree("else where")
    for words in commands:
        typed(words)
    again = open_run(None)
    assert again.config == run.config and again.dataset == run.dataset
    piped = prepare_command(replace(dataset, sources=("-",)))
    assert piped.startswith("attnlm prepare - --tokenizer") and piped.endswith(" < TEXT")


@pytest.mark.parametrize(
    ("model", "characters"), [("bigram", "a"), ("single-head", "ab"), ("transformer", "a")]
)
def test_the_smallest_runs_have_reports(
    model: str, characters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of one token, one step, a vocabulary of one or two ids, few tokens to validate."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(characters * 20)
    attnlm.prepare("text.txt")
    size: dict[str, Any] = {} if model == "bigram" else {"embed_dim": 8}
    attnlm.train(model=model, block_size=1, steps=1, seed=1, threads=1, name="least", **size)
    if model != "bigram":
        typed("attnlm attend a --output a.png")
    for words in ("trace a", "report", "report --json", "export least b.html --to html"):
        typed(f"attnlm {words}")


def test_the_report_is_one_file_with_the_loss_without_each_head(found: Report, page: Path) -> None:
    content = page.read_bytes()
    asks_for_nothing(content)
    assert content == found.page()
    assert found.heads is not None and "loss without it" in content.decode()
    for head in found.heads.heads:
        assert f"<td>{head.loss_change:+z.4f}</td>" in content.decode()


SAID = "</script><script>alert(1)</script><b>&amp;"


@pytest.mark.parametrize(
    ("text", "held", "shown"),
    [
        (SAID, SAID, "&lt;b&gt;&amp;amp;"),
        ("\na\x00\tb\r\n c", "\na\\x00⇥b\n c", "⏎ a\\x00⇥b⏎  c</td>"),
    ],
)
def test_samples_are_escaped(
    text: str, held: str, shown: str, found: Report, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = [replace(one, text=text) for one in found.run.ticker()]
    monkeypatch.setattr(Run, "ticker", lambda self: snapshots)
    content = found.page()
    assert data_of(content)["snapshots"][0]["text"] == held and shown in content.decode()
    usual, ours = (elements(one).found for one in (page.read_bytes(), content))
    assert [tag for tag, _ in ours].count("script") == [tag for tag, _ in usual].count("script")


def scores_at(snapshot: Snapshot) -> dict[tuple[int, int], float]:
    """The previous-token score of each head, by its formula."""
    assert snapshot.weights is not None
    before = [snapshot.weights[..., t, t - 1] for t in range(1, snapshot.weights.shape[-1])]
    return {place: float(score) for place, score in np.ndenumerate(np.mean(before, axis=0))}


def test_films_show_the_heads_with_the_largest_scores(
    found: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.see.report._MOST_FILMS", 3)
    scores = scores_at(found.run.ticker()[-1])
    best = sorted(scores, key=lambda place: scores[place])[1:]
    named = {f"layer {i + 1} head {j + 1}": scores[i, j] for i, j in best}
    films = {film["name"]: film["scores"][-1] for film in data_of(found.page())["films"]}
    assert films == pytest.approx(named, abs=0.0006)
    assert [*films.values()] == sorted(films.values(), reverse=True)


def test_many_snapshots_and_recorded_attention_stay_below_4_mb(
    found: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 12 layers of 12 heads and a context of 1024 tokens."""
    attention = attention_like(12, 12, 1024)
    maps = attention.weights[..., :24, :24]
    ticker = [Snapshot.of(step, "a line of forty characters" * 3, maps) for step in range(100)]
    monkeypatch.setattr(Run, "ticker", lambda self: ticker)
    monkeypatch.setattr(Run, "ticker_passage", lambda self: attention.tokens[:24])
    content = replace(found, models=[], attention=attention).page()
    assert len(content) < 6_000_000
    data = data_of(content)
    steps = [snapshot["step"] for snapshot in data["snapshots"]]
    assert len(steps) == 32 and {0, 1, 3, 10, 99} < {*steps} and steps == sorted({*steps})
    assert f"{len(steps)} of the 100 are shown" in content.decode()
    length = len(data["attention"]["tokens"])
    assert 150 < length < 1024 and f"the first {length} tokens" in content.decode()


# --- In a browser ---------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_model_of_a_report_runs_in_its_page(view: Any, found: Report) -> None:
    assert view.evaluate("attnlm.models.map((model) => model.name)") == ["transformer"]
    assert view.input_value("#prompt") == found.text
    view.locator("#models li").first.wait_for()
    view.fill("#seed", "1")
    view.click("#run")
    until(view, "document.querySelectorAll('.sampled').length === 200")


def chart_x(view: Any, step: int, end: int) -> float:
    """The horizontal place of a step in the chart."""
    box = view.locator("#curve").bounding_box()
    return float(box["x"] + box["width"] * (30 + 442 * step / end) / 480)


def test_the_slider_moves_mark_line_and_map(view: Any, found: Report) -> None:
    snapshots = found.run.ticker()
    last = len(snapshots) - 1

    def middle(shown: Any) -> float:
        box = shown.bounding_box()
        return float(box["x"] + box["width"] / 2)

    def shows(number: int) -> None:
        snapshot = snapshots[number]
        step = f"step {snapshot.step}"
        assert view.locator("#lines .now th").text_content() == str(snapshot.step)
        assert view.get_attribute("#snapshot", "aria-valuetext").startswith(step)
        for element in ("#frames [aria-pressed=true]", "#film-caption"):
            assert step in view.locator(element).text_content()
        wanted = chart_x(view, snapshot.step, 30)
        assert middle(view.locator("#curve .mark")) == pytest.approx(wanted, abs=1)

    shows(last)
    view.press("#snapshot", "Home")
    shows(0)
    view.keyboard.press("ArrowRight")
    shows(1)
    view.locator("#frames button").nth(4).click()
    shows(4)
    view.locator("#lines tbody tr").nth(2).click()
    shows(2)
    picture = view.locator("#curve")
    picture.click(position={"x": chart_x(view, 30, 30) - picture.bounding_box()["x"] - 1, "y": 40})
    shows(last)
    view.click("#play")
    assert view.input_value("#snapshot") == "0" and view.inner_text("#play") == "Stop"
    until(view, "document.querySelector('#snapshot').valueAsNumber > 1")
    view.click("#play")
    assert view.inner_text("#play") == "Play"


def test_the_curve_has_the_losses_at_their_steps(view: Any, found: Report) -> None:
    assert found.result is not None
    records = found.result.records
    drawn = view.get_attribute("#curve .dash-0", "d")
    places = np.array([place.split() for place in drawn[1:].split("L")], float)
    steps, losses = (np.array([getattr(r, f) for r in records]) for f in ("step", "val_loss"))
    np.testing.assert_allclose(places[:, 0], 30 + 442 * steps / steps[-1], atol=0.06)
    heights = 268 - places[:, 1]
    np.testing.assert_allclose(heights / heights[0], losses / losses[0], atol=1e-3)
    words = view.inner_text(".legend")
    assert f"validation {losses[-1]:.3f}" in words and "training" in words


def test_the_film_shows_the_scores_of_the_chosen_head(view: Any, found: Report, page: Path) -> None:
    films = data_of(page.read_bytes())["films"]
    snapshots = found.run.ticker()
    scores = [scores_at(snapshot) for snapshot in snapshots]
    assert view.input_value("#head") == "0"  # the largest score in the end
    past = np.tril_indices(len(found.run.ticker_passage()))
    for number, film in enumerate(films):
        layer, head = re.findall(r"\d+", film["name"])
        place = int(layer) - 1, int(head) - 1
        view.select_option("#head", str(number))
        shown = [float(text) for text in view.locator("#frames small").all_text_contents()]
        assert shown == pytest.approx([at_step[place] for at_step in scores], abs=0.008)
        assert film["name"] in view.text_content("#film-caption")
        maps = [one.weights[place][past] for one in snapshots if one.weights is not None]
        drawn = np.frombuffer(base64.b64decode(film["maps"]), np.uint8) / 255
        np.testing.assert_allclose(drawn, np.concatenate(maps), atol=0.003)
        view.focus("#snapshot")  # the large map shows this step
        for key, weights in (("Home", maps[0]), ("End", maps[-1])):
            view.keyboard.press(key)
            drawn = darkness(view, "#film canvas")[past]
            assert np.corrcoef(drawn, np.sqrt(weights))[0, 1] > 0.98


def test_printed_pages_are_complete_and_readable(open_page: Any, page: Path) -> None:
    a4 = 688  # pixels between the margins
    view = open_page(page, width=a4)
    view.emulate_media(media="print")
    until(view, "!attnlm.modelPage.isBusy")
    right = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
    assert view.locator("main > :not(.explore) *").evaluate_all(right) <= a4 + 1
    size = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
    assert view.locator(".scores td").evaluate_all(size) >= 7.5 * 96 / 72
    assert view.locator("#curve").bounding_box()["width"] == 448


@pytest.mark.parametrize(("width", "smallest"), [(360, 8.5), (1280, 12)])
def test_token_labels_are_readable_and_aligned_with_their_rows(
    width: int, smallest: float, open_page: Any, page: Path
) -> None:
    view = open_page(page, width=width)
    rows = view.locator("#film .rows span").evaluate_all(
        "spans => spans.map(span => [parseFloat(getComputedStyle(span).fontSize),"
        " ...['top', 'bottom'].map(side => span.getBoundingClientRect()[side])])"
    )
    box = view.locator("#film canvas").bounding_box()
    cell = box["height"] / len(rows)
    assert box["height"] == pytest.approx(box["width"], abs=1)
    for number, (size, top, bottom) in enumerate(rows):
        assert size >= smallest
        middle = box["y"] + (number + 0.5) * cell
        assert (top + bottom) / 2 == pytest.approx(middle, abs=2)


def test_texts_are_shown_without_scripts_and_in_print(
    open_page: Any, page: Path, found: Report
) -> None:
    view = open_page(page, java_script_enabled=False)
    shown = view.inner_text("body")
    for snapshot in found.run.ticker():
        assert " ".join(snapshot.text.replace("\n", "⏎ ").split()) in " ".join(shown.split())
    assert "This part needs JavaScript" in shown
    view.emulate_media(media="print")
    lines, around = (view.locator(part).bounding_box()["height"] for part in ("#lines", ".lines"))
    assert lines <= around


def test_the_report_fits_phone_desk_and_paper(browser: Any, page: Path) -> None:
    check_fits(browser, page, "report")


def test_a_run_of_one_evaluation_has_no_curve(
    open_page: Any, found: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found.result is not None
    ticker = found.run.ticker()[:1]
    monkeypatch.setattr(Run, "ticker", lambda self: ticker)
    first = replace(found.result, records=found.result.records[:1])
    view = open_page(replace(found, result=first).page())
    assert "A curve needs two evaluations or more" in view.inner_text("body")
    view.press("#snapshot", "ArrowLeft")
    assert view.locator("#frames button").count() == 1
    view.select_option("#head", "0")
    assert ", step 0" in view.inner_text("#film-caption")


# --- Recorded attention, of models that do not run in a page --------------------------------------

OWN = "echo"


@pytest.fixture(name="own", scope="module")
def a_report_of_own_code(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("own")
    how: dict[str, Any] = {"attention": OWN, "block_size": 16, "steps": 3}
    run = quick_run(trained / "data" / "foxes", "transformer:layers=2:heads=2:embed_dim=8",
                    checkpoint_dir=folder, **how)  # fmt: skip
    return report(run, text=TEXT, windows=2)


@pytest.fixture(name="recorded")
def an_opened_page_of_own_code(own: Report, open_page: Any) -> Any:
    view = open_page(own.page())
    view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
    return view


def test_own_code_has_its_recorded_attention(own: Report, trained: Path) -> None:
    assert own.models == [] and own.attention is not None and own.heads is not None
    seen = attnlm.attend(TEXT, own.run)
    np.testing.assert_array_equal(own.attention.weights, seen.weights)
    content = own.page()
    asks_for_nothing(content)
    assert CAUTION in content.decode()
    data = data_of(content)["attention"]
    maps = np.frombuffer(base64.b64decode(data["maps"]), np.uint8) / 255
    past = seen.weights[..., *np.tril_indices(len(TEXT))]
    np.testing.assert_allclose(maps, past.ravel(), atol=0.51 / 255)


def shares(view: Any) -> list[float]:
    """The tints of the text."""
    script = "all => all.map(one => Number(one.style.getPropertyValue('--fraction')))"
    found: list[float] = view.locator("#text button").evaluate_all(script)
    return found


def test_pointing_and_keys_choose_a_token_and_its_weights(recorded: Any, own: Report) -> None:
    view, attention = recorded, own.attention
    assert attention is not None

    def shows(place: int) -> None:
        np.testing.assert_allclose(shares(view), attention.weights[0, 0, place], atol=0.003)
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


def test_a_head_is_chosen_in_the_grid(recorded: Any, own: Report) -> None:
    past = np.tril_indices(len(TEXT))
    view = recorded

    def shows(layer: int, head: int) -> None:
        assert own.attention is not None
        map_TT = own.attention.weights[layer, head]
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


def test_cells_are_blocks_of_a_long_text(open_page: Any, own: Report) -> None:
    attention = attention_like(1, 4, 300)
    cells = 96
    member = np.eye(cells)[np.arange(300) * cells // 300]
    blocks = member.T @ attention.weights[0, 3] @ member / member.sum(0)[:, None]
    np.testing.assert_allclose(blocks.sum(-1), 1, atol=1e-4)
    past = np.tril_indices(cells)
    view = open_page(replace(own, attention=attention).page())
    view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
    found = darkness(view, "#thumbnails button >> nth=3 >> canvas")
    assert np.corrcoef(found[past], np.sqrt(blocks[past]))[0, 1] > 0.95


def test_maps_take_the_colour_of_the_scheme(recorded: Any) -> None:
    first_pixel = """() => {
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(document.querySelector("#large canvas"), 0, 0);
      return copy.getImageData(0, 0, 1, 1).data.join();
    }"""
    assert recorded.evaluate(first_pixel) == "11,47,94,255"
    recorded.emulate_media(color_scheme="dark")
    # The page redraws with one of its next frames, late on a busy machine.
    until(recorded, f"({first_pixel})() === '207,230,255,255'")
