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
import torch

import attnlm
from attnlm import Report, open_run
from attnlm.model.architecture import RUNGS
from attnlm.model.language_model import Transformer
from attnlm.model.recorder import record
from attnlm.runs.journal import Snapshot
from attnlm.see.attend import CAUTION
from attnlm.see.head_scores import PATTERNS
from attnlm.see.report import LensRow, logit_lens, report
from attnlm.see.report_page import lens_data, report_page
from attnlm.see.reproduce import prepare_command
from tests.browser import asks_for_nothing, check_fits, darkness, elements, until
from tests.kit import command, fails
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
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(report_page(found))
    return path


@pytest.fixture(name="view")
def an_opened_page(page: Path, open_page: Any) -> Any:
    return open_page(page)


def of(name: str, runs: Path, **how: Any) -> Report:
    return report(open_run(name, checkpoint_dir=runs), device="cpu", **how)


def html(found: Report) -> str:
    return report_page(found).decode()


def data_of(content: bytes) -> Any:
    return json.loads(elements(content).scripts[0])


# --- What it gathers ------------------------------------------------------------------------------


def test_a_report_contains_the_results_of_the_single_commands(runs: Path) -> None:
    run = open_run("transformer", checkpoint_dir=runs)
    events: list[object] = []
    found = report(run, text=TEXT, windows=3, device="cpu", on_event=events.append)
    seen = attnlm.attend(run, TEXT)
    assert found.attention.tokens == list(TEXT)
    np.testing.assert_array_equal(found.attention.weights, seen.weights)
    np.testing.assert_array_equal(found.attention.probabilities, seen.probabilities)
    assert found.heads == attnlm.heads(run, windows=3, device="cpu")
    assert found.result is not None
    assert found.result.best.val_loss == min(record["val_loss"] for record in run.metrics())
    assert found.data_gone == ""
    assert re.match(r"3 of \d+ windows of 16 tokens", found.heads_over)
    tasks = [(event.task, event.done) for event in events if isinstance(event, attnlm.Progress)]
    assert tasks == [("scoring heads", 0), ("sampling", 1)]


def test_the_default_text_is_the_validation_split(runs: Path, trained: Path) -> None:
    found = of("multi-head", runs, checkpoint="last")
    assert found.ids == attnlm.open_dataset(trained / "data" / "foxes").val[:16].tolist()
    assert found.text_is == "the first 16 tokens of the validation split"
    assert "".join(found.attention.tokens) == "".join(found.passage)
    assert "read by the last checkpoint" in html(found)
    with pytest.raises(attnlm.AttnlmError, match="`checkpoint`"):
        of("multi-head", runs, checkpoint="worst")


@pytest.mark.parametrize("rung", [*RUNGS, "projected", "tied"])
def test_every_rung_has_a_page(rung: str, runs: Path) -> None:
    found = of(rung, runs)
    page = html(found)
    assert found.result is not None
    assert f"{found.result.best.val_loss:.4f}" in page and found.verdict[1:] in page
    for words in (CAUTION, "Heads by measurement", "A head forming"):
        assert (words in page) == (rung != "bigram")
    assert ("The logit lens" in page) == (rung in ("transformer", "tied"))
    assert "loss without it" not in page
    for words in (*found.commands, found.sample_command):
        assert words in elements(page.encode()).text
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_missing_data_sets_and_snapshots_are_reported(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "transformer", tmp_path / "transformer")
    run = open_run(tmp_path / "transformer")
    run = replace(run, dataset=replace(run.dataset, path=str(tmp_path / "nowhere" / "foxes")))
    run.save_config()
    found = report(run, data_dir=tmp_path)
    assert found.heads is None and "data set of transformer is gone" in found.heads_over
    assert "as the run recorded them" in found.text_is
    assert found.attention.tokens == list(found.passage)
    words = elements(report_page(found)).text
    assert "Not measured: the data set" in words
    assert f"attnlm report transformer --text TEXT --checkpoint-dir {tmp_path}" in words
    assert len(found.commands) == 1 and found.commands[0].startswith("attnlm train")
    measured = report(run, text=TEXT, data_dir=tmp_path)
    assert measured.heads is not None and measured.heads.window == len(TEXT) - 1
    assert "of the text above only" in measured.heads_over
    too_short = report(run, text="th", data_dir=tmp_path)
    assert too_short.heads is None and "too short" in too_short.heads_over
    (run.path / "ticker.jsonl").unlink()
    alone = report(run, data_dir=tmp_path)
    assert "own first words" in alone.text_is and len(alone.ids) == 16
    assert alone.snapshots == [] and alone.passage == []
    page = html(alone)
    assert "There is no record of what the model generated during training" in page
    assert "<svg" in page and 'id="snapshot"' not in page and "report_page.js" not in page
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
    assert found.result is None and "own first words, since it has no data set" in found.text_is
    assert found.heads is not None and not found.heads.has_text
    assert found.commands == [f"attnlm import a/folder --name theirs --checkpoint-dir {tmp_path}"]
    page = html(found)
    for words in ("The logit lens", "Heads by measurement", "imported from", "What it writes"):
        assert words in page
    for words in ("While it learned", "best loss", "SHA-256", "learning rate"):
        assert words not in page


@pytest.mark.parametrize("rung", ["transformer", "tied"])
def test_a_row_of_the_lens_equals_the_model_without_later_layers(rung: str, runs: Path) -> None:
    model, _ = attnlm.load_model(runs / rung, device="cpu")
    assert isinstance(model, Transformer)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    rows = logit_lens(model, record(model, ids[None]), count=4)
    assert [row.name for row in rows] == ["embedding", "layer 1", "layer 2"]
    for kept in (2, 1, 0):
        model.blocks = model.blocks[:kept]
        with torch.no_grad():
            likeliest = torch.softmax(model(ids[None])[0], -1).max(-1)
        assert rows[kept].ids[:, 0].tolist() == likeliest.indices.tolist()
        np.testing.assert_allclose(rows[kept].probabilities[:, 0], likeliest.values, atol=1e-5)
    words = [f"<{i}>" for i in range(model.vocab_size)]
    data = lens_data(rows, words)
    ids_LTK = np.stack([row.ids for row in rows])
    probabilities_LTK = np.stack([row.probabilities for row in rows])
    assert ids_LTK.shape == (len(rows), len(ids), 4) and (np.diff(probabilities_LTK) <= 0).all()
    assert [data["words"][i] for i in data["ids"]] == [words[i] for i in ids_LTK.ravel()]
    np.testing.assert_allclose(data["percents"], 100 * probabilities_LTK.ravel(), atol=0.51)


def typed(words: str) -> str:
    return command(*shlex.split(words)[1:], cwd=Path.cwd()).stdout


def test_the_command_writes_the_report(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    Path("the fox").touch()
    done = command("report", "tied", "--text", "the fox", cwd=Path.cwd())
    assert done.stdout == "checkpoints/tied/report.html\n"
    assert "--text takes a text, not a file: the model reads 'the fox' itself" in done.stderr
    page = (runs / "tied" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    out = tmp_path / "page.html"
    facts = json.loads(typed(f"attnlm report bigram --json -o {shlex.quote(str(out))}"))
    assert facts["output"] == str(out) and out.is_file() and facts["heads"] == []
    assert facts["commands"][1].startswith("attnlm train foxes --model bigram")


def test_the_report_shows_a_longer_sample_and_its_command(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    found = of("single-head", Path("checkpoints"), checkpoint="last")
    assert len(found.sample) == 500
    words = "attnlm sample single-head --checkpoint last --tokens 500 --seed 1"
    assert found.sample_command == words  # which is not the run trained last
    assert typed(f"{words} --device cpu") == found.sample == found.facts()["sample"]
    assert elements(report_page(found)).text.count(found.sample) == 1


@pytest.mark.parametrize("rung", ["bigram", "transformer", "projected", "drawn"])
def test_the_commands_of_a_report_reproduce_the_run(
    rung: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has nothing but the text."""
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
    piped = prepare_command(replace(dataset, source="-", sources=("-",)))
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
        typed("attnlm attend a --output a.html")
        typed("attnlm attend a --output a.png")
    for words in ("trace a", "report", "report --json", "export least b.html --to html"):
        typed(f"attnlm {words}")


def test_the_report_is_one_file_with_the_loss_without_each_head(found: Report, page: Path) -> None:
    content = page.read_bytes()
    asks_for_nothing(content)
    assert content == report_page(found)
    assert found.heads is not None and "loss without it" in content.decode()
    for head in found.heads.heads:
        assert f"<td>{head.loss_change:+z.4f}</td>" in content.decode()


SAID = "</script><script>alert(1)</script><b>&amp;"


@pytest.mark.parametrize(
    ("text", "held", "shown"),
    [
        (SAID, SAID, "&lt;b&gt;&amp;amp;"),
        ("\na\x00\tb\r\n c", "\na\\x00⇥b\n c", '<pre id="said">\n\na'),
    ],
)
def test_samples_are_escaped(text: str, held: str, shown: str, found: Report, page: Path) -> None:
    snapshots = [replace(one, text=text) for one in found.snapshots]
    content = report_page(replace(found, snapshots=snapshots))
    assert data_of(content)["snapshots"][0]["text"] == held and shown in content.decode()
    usual, ours = (elements(one).found for one in (page.read_bytes(), content))
    assert [tag for tag, _ in ours].count("script") == [tag for tag, _ in usual].count("script")


def scores_at(snapshot: Snapshot) -> dict[tuple[int, int], float]:
    """The previous-token score of each head, by its formula."""
    assert snapshot.maps is not None
    before = [snapshot.maps[..., t, t - 1] for t in range(1, snapshot.maps.shape[-1])]
    return {place: float(score) for place, score in np.ndenumerate(np.mean(before, axis=0))}


def test_films_show_the_heads_with_the_largest_scores(
    found: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.see.report_page._MOST_FILMS", 3)
    scores = scores_at(found.snapshots[-1])
    best = sorted(scores, key=lambda place: scores[place])[1:]
    named = {f"layer {i + 1} head {j + 1}": scores[i, j] for i, j in best}
    content = report_page(found)
    films = {film["name"]: film["scores"][-1] for film in data_of(content)["films"]}
    assert films == pytest.approx(named, abs=0.0006)
    assert "Of 4 heads, these are the 3 with the largest" in content.decode()


def test_a_large_model_and_a_long_text_stay_below_3_mb(found: Report) -> None:
    """The run has 6 layers of 6 heads, 100 evaluations and a context of 256 tokens."""
    attention = attention_like(6, 6, 256, 65)
    maps = attention.weights[..., :24, :24]
    ones, fifths = np.ones((256, 5), np.int64), np.full((256, 5), np.float32(0.2))
    assert found.heads is not None and found.result is not None
    head, last = found.heads.heads[0], found.result.last
    heads = [replace(head, layer=layer, head=n) for layer in range(6) for n in range(6)]
    large = replace(
        found,
        result=replace(found.result, records=[replace(last, step=step) for step in range(100)]),
        snapshots=[
            Snapshot(step, "a line of about forty characters" * 3, maps) for step in range(100)
        ],
        passage=attention.tokens[:24],
        ids=[i % 65 for i in range(256)],
        attention=attention,
        lens=[LensRow(f"layer {n}", ones, fifths) for n in range(7)],
        heads=replace(found.heads, heads=heads),
    )
    content = report_page(large)
    assert len(content) < 3_000_000
    steps = [snapshot["step"] for snapshot in data_of(content)["snapshots"]]
    assert len(steps) == 32 and {0, 1, 3, 10, 99} < {*steps} and steps == sorted({*steps})
    assert f"{len(steps)} of the 100 are shown" in content.decode()


# --- In a browser ---------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_lens_follows_the_chosen_token(view: Any, found: Report) -> None:
    for key, place in (("Home", 0), ("End", len(found.ids) - 1)):
        view.focus("#text [aria-pressed=true]")
        view.keyboard.press(key)
        assert f"token {place + 1}," in view.inner_text("#lens-token")
        for number, row in enumerate(found.lens):
            shown = view.locator("#lens-at tr").nth(number).locator("small")
            percents = [int(text[:-1]) for text in shown.all_text_contents()]
            assert percents == np.rint(100 * row.probabilities[place]).tolist()


def test_scores_are_heat_maps_now_and_over_training(view: Any, found: Report) -> None:
    assert found.heads is not None and found.over_training is not None
    maps = view.locator(".heat")
    assert maps.count() == 2 * len(PATTERNS)
    for number, pattern in enumerate(PATTERNS):
        cells = maps.nth(number).locator("td")
        wanted = [head.scores[pattern] for head in found.heads.heads]
        assert cells.all_text_contents() == [f"{100 * score:.0f}" for score in wanted]
        tints = cells.evaluate_all("all => all.map(c => +c.style.getPropertyValue('--fraction'))")
        assert tints == pytest.approx(wanted, abs=0.001)
    assert found.over_training.steps == [one.step for one in found.snapshots]
    last = maps.last.locator("tbody tr").last.locator("td")
    wanted = found.over_training.maps.grids[-1].values[-1].tolist()
    assert last.all_text_contents() == [f"{100 * x:.0f}" for x in wanted]


def test_the_parts_of_the_logit_are_shown(view: Any, found: Report) -> None:
    assert [part for part, _ in found.added][:2] == ["embedding", "layer 1 head 1"]
    logits = [logit for _, logit in found.added]
    model, _ = attnlm.load_model(found.run, checkpoint=found.checkpoint, device="cpu")
    with torch.no_grad():
        whole = float(model(torch.tensor([found.ids]))[0, -1].max())
    assert sum(logits) == pytest.approx(whole, abs=1e-4)
    section = view.locator("section", has=view.locator("#added"))
    assert f"{sum(logits):.3f}" in section.locator("strong").inner_text()
    assert section.locator(".percent").all_text_contents() == [f"{x:z.3f}" for x in logits]
    colour = "all => all.map(bar => getComputedStyle(bar).backgroundColor)"
    colours = {
        x < 0: c for x, c in zip(logits, section.locator(".bar").evaluate_all(colour), strict=True)
    }
    assert len(set(colours.values())) == len(colours) == 2


def test_the_slider_moves_mark_line_and_map(view: Any, found: Report) -> None:
    last = len(found.snapshots) - 1

    def middle(shown: Any) -> float:
        box = shown.bounding_box()
        return float(box["x"] + box["width"] / 2)

    def on_axis(step: int) -> float:
        return middle(view.locator("#curve text", has_text=re.compile(f"^{step}$")))

    def shows(number: int) -> None:
        snapshot = found.snapshots[number]
        step = f"step {snapshot.step}"
        assert view.locator("#said").text_content() == snapshot.text
        assert view.locator("#lines .now th").text_content() == str(snapshot.step)
        assert view.get_attribute("#snapshot", "aria-valuetext").startswith(step)
        for element in ("#when", "#frames [aria-pressed=true]", "#film-caption"):
            assert step in view.locator(element).text_content()
        wanted = on_axis(0) + (on_axis(30) - on_axis(0)) * snapshot.step / 30
        assert middle(view.locator("#mark")) == pytest.approx(wanted, abs=1)

    shows(last)
    view.press("#snapshot", "Home")
    shows(0)
    view.keyboard.press("ArrowRight")
    shows(1)
    view.locator("#frames button").nth(4).click()
    shows(4)
    view.locator("#lines tbody tr").nth(2).click()
    shows(2)
    picture = view.locator("#curve svg")
    picture.click(position={"x": on_axis(30) - picture.bounding_box()["x"], "y": 40})
    shows(last)
    view.click("#play")
    assert view.input_value("#snapshot") == "0" and view.inner_text("#play") == "Stop"
    until(view, "document.querySelector('#snapshot').valueAsNumber > 1")
    view.click("#play")
    assert view.inner_text("#play") == "Play"


def test_the_film_shows_the_scores_of_the_chosen_head(view: Any, found: Report, page: Path) -> None:
    films = [base64.b64decode(film["maps"]) for film in data_of(page.read_bytes())["films"]]
    scores = [scores_at(snapshot) for snapshot in found.snapshots]
    best = max(scores[-1], key=lambda place: scores[-1][place])
    assert view.input_value("#head") == str(2 * best[0] + best[1])
    past = np.tril_indices(len(found.passage))
    for number, place in enumerate(scores[-1]):
        view.select_option("#head", str(number))
        shown = [float(text) for text in view.locator("#frames small").all_text_contents()]
        assert shown == pytest.approx([at_step[place] for at_step in scores], abs=0.008)
        name = f"layer {place[0] + 1} head {place[1] + 1}"
        assert name in view.text_content("#film-caption")
        maps = [one.maps[place][past] for one in found.snapshots if one.maps is not None]
        drawn = np.frombuffer(films[number], np.uint8) / 255
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
    view.evaluate(
        "document.querySelectorAll('.lens td, .lens thead th').forEach(cell => {"
        " (cell.querySelector('span') ?? cell).textContent = 'orrowing' })"
    )
    right = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
    assert view.locator("main *").evaluate_all(right) <= a4 + 1
    size = "all => Math.min(...all.map(one => parseFloat(getComputedStyle(one).fontSize)))"
    assert view.locator(".lens td, .scores td").evaluate_all(size) >= 7.5 * 96 / 72
    assert view.locator("#curve svg").bounding_box()["width"] == 448


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
    for snapshot in found.snapshots:
        assert " ".join(snapshot.text.replace("\n", "⏎ ").split()) in " ".join(shown.split())
    assert "This part needs JavaScript" in shown and view.is_visible("#curve svg")
    view.emulate_media(media="print")
    lines, around = (view.locator(part).bounding_box()["height"] for part in ("#lines", ".lines"))
    assert lines <= around


def test_the_report_fits_phone_desk_and_paper(browser: Any, page: Path) -> None:
    check_fits(browser, page, "report")


def test_a_run_of_one_evaluation_has_no_curve(open_page: Any, found: Report) -> None:
    assert found.result is not None
    first = replace(found.result, records=found.result.records[:1])
    view = open_page(report_page(replace(found, result=first, snapshots=found.snapshots[:1])))
    assert "A curve needs two evaluations or more" in view.inner_text("body")
    view.press("#snapshot", "ArrowLeft")
    assert view.locator("#frames button").count() == 1
    view.select_option("#head", "0")
    assert "layer 1 head 1, step 0" in view.inner_text("#film-caption")
