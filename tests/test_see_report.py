"""The report of a run: what it gathers, the commands that make it again, its page in a browser."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Progress
from attnlm.cli.app import run_command
from attnlm.model.architecture import RUNGS
from attnlm.runs.load_model import load_model
from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run
from attnlm.runs.ticker import Snapshot
from attnlm.see.attend import CAUTION, Attention, attend
from attnlm.see.heads import PATTERNS, study_heads
from attnlm.see.pictures import strip
from attnlm.see.report import LensRow, Report, report
from attnlm.see.report_page import previous_token_score, report_page
from attnlm.see.reproduce import prepare_command
from tests.browser import check_fits, opened, photograph
from tests.command import fails
from tests.test_see_attend_page import elements

TEXT = "the quick fox"


@pytest.fixture(name="runs", scope="module")
def copied_runs(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the trained runs, in a copy."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return folder / "checkpoints"


def of(name: str, runs: Path, **how: Any) -> Report:
    return report(open_run(name, checkpoint_dir=runs), device="cpu", **how)


def html(page: bytes) -> str:
    return page.decode()


# --- What it gathers ------------------------------------------------------------------------------


def test_it_gathers_what_the_single_commands_show(runs: Path) -> None:
    run = open_run("transformer", checkpoint_dir=runs)
    found = report(run, text=TEXT, windows=3, device="cpu")
    seen = attend(run, TEXT)
    assert found.attention.tokens == list(TEXT)
    np.testing.assert_array_equal(found.attention.weights, seen.weights)
    np.testing.assert_array_equal(found.attention.probabilities, seen.probabilities)
    assert found.heads == study_heads(run, windows=3, device="cpu")
    assert found.best is not None
    assert found.best["val_loss"] == min(record["val_loss"] for record in run.metrics())
    assert found.data_gone == "" and "3 windows of 16 tokens" in found.heads_over


def test_it_reports_its_progress(runs: Path) -> None:
    events: list[object] = []
    of("single-head", runs, ablate=True, on_event=events.append)
    tasks = [(event.task, event.done) for event in events if isinstance(event, Progress)]
    assert tasks == [("scoring heads", 0), ("ablate", 0), ("sampling", 1)]


def test_without_a_text_it_reads_the_validation_split(runs: Path, trained: Path) -> None:
    found = of("multi-head", runs)
    val = attnlm.open_dataset(trained / "data" / "foxes").val
    assert found.ids == val[:16].tolist()
    assert found.text_is == "the first 16 tokens of the validation split"
    assert "".join(found.attention.tokens) == "".join(found.passage)


@pytest.mark.parametrize("rung", [*RUNGS, "projected", "tied"])
def test_every_rung_has_a_page(rung: str, runs: Path) -> None:
    found = of(rung, runs)
    page = html(report_page(found))
    assert found.best is not None
    assert f"{found.best['val_loss']:.4f}" in page and found.verdict[1:] in page
    assert (CAUTION in page) == (rung != "bigram")
    assert ("The logit lens" in page) == (rung != "bigram")
    assert ("Heads by measurement" in page) == (rung != "bigram")
    assert ("A head forming" in page) == (rung != "bigram")
    for command in (*found.commands, found.sample_command):
        assert command in elements(page.encode()).text
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_run_of_an_older_version_has_a_page_too(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "transformer", tmp_path / "old")
    (tmp_path / "old" / "ticker.jsonl").unlink()
    found = of("old", tmp_path)
    assert found.snapshots == [] and found.passage == []
    page = html(report_page(found))
    assert "There is no record of what the model generated during training" in page
    assert "<svg" in page and 'id="snapshot"' not in page and "report.js" not in page


def gone(runs: Path, tmp_path: Path, name: str = "transformer") -> Run:
    """A run whose data set is nowhere."""
    shutil.copytree(runs / name, tmp_path / name)
    run = open_run(tmp_path / name)
    run = replace(run, dataset={**run.dataset, "path": str(tmp_path / "nowhere" / "foxes")})
    run.save_config()
    return run


def test_without_the_data_set_it_says_so(runs: Path, tmp_path: Path) -> None:
    run = gone(runs, tmp_path)
    found = report(run, data_dir=tmp_path)
    assert found.heads is None and "no data set is called 'foxes'" in found.heads_over
    assert "as the run recorded them" in found.text_is
    assert found.attention.tokens == list(found.passage)
    page = html(report_page(found))
    assert "Not measured: no data set is called" in page
    assert len(found.commands) == 1 and found.commands[0].startswith("attnlm train")
    measured = report(run, text=TEXT, data_dir=tmp_path)
    assert measured.heads is not None and measured.heads.window == len(TEXT) - 1
    assert "of the text above only" in measured.heads_over
    too_short = report(run, text="the"[:2], data_dir=tmp_path)
    assert too_short.heads is None and "too short" in too_short.heads_over
    (run.path / "ticker.jsonl").unlink()
    alone = report(run, data_dir=tmp_path)
    assert "own first words" in alone.text_is and len(alone.ids) == 16


def test_ablation_is_optional(runs: Path) -> None:
    assert "loss without it" not in html(report_page(of("multi-head", runs)))
    ablated = of("multi-head", runs, windows=2, ablate=True)
    assert ablated.heads is not None
    page = html(report_page(ablated))
    assert "loss without it" in page
    for head in ablated.heads.heads:
        assert f"<td>{head.loss_change:+z.4f}</td>" in page


def test_it_shows_a_longer_text_and_what_prints_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(runs.parent)
    found = of("single-head", Path("checkpoints"), checkpoint="last")
    assert len(found.sample) == 500
    command = "attnlm sample single-head --checkpoint last --tokens 500 --seed 1"
    assert found.sample_command == command  # which is not the run trained last
    typed(f"{command} --device cpu", monkeypatch)
    assert capsys.readouterr().out == found.sample
    assert found.facts()["sample"] == found.sample
    assert elements(report_page(found)).text.count(found.sample) == 1


def test_without_the_data_set_it_names_the_run_for_another_try(runs: Path, tmp_path: Path) -> None:
    page = elements(report_page(report(gone(runs, tmp_path), data_dir=tmp_path)))
    assert f"attnlm report transformer --text TEXT --checkpoint-dir {tmp_path}" in page.text


# --- The commands ---------------------------------------------------------------------------------


def typed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    run_command()


@pytest.mark.parametrize("rung", [*RUNGS, "projected", "tied", "drawn"])
def test_its_commands_make_the_run_again(
    rung: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In a folder where nothing is but the text."""
    (tmp_path / "text.txt").write_bytes((trained / "text.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    dataset = attnlm.prepare("text.txt", name="foxes", val_fraction=0.2)
    settings: dict[str, Any] = {"sampling": "random", "gradient_clip": 1.5, "steps": 4}
    if rung == "drawn":  # a seed that nobody gave, a schedule of its own, early stopping
        settings |= {"model": "multi-head", "schedule": "cosine", "warmup": 2, "patience": 3}
        original = attnlm.train(dataset.path, threads=1, block_size=8, **settings)
    else:
        old = open_run(rung, checkpoint_dir=trained / "checkpoints").config.settings()
        original = attnlm.train(dataset.path, **{**old, **settings})
    found = report(original, windows=1)
    shutil.rmtree("data")
    for command in found.commands:
        typed(command, monkeypatch)
    again = open_run(None)
    assert again.name != original.name
    assert again.config.settings() == original.config.settings()
    for key in ("train_sha256", "val_sha256", "name", "bigram_loss"):
        assert again.dataset[key] == original.dataset[key]
    timed = ("seconds", "tokens_per_second")
    ours, theirs = (
        [{k: v for k, v in record.items() if k not in timed} for record in run.metrics()]
        for run in (again, original)
    )
    assert ours == theirs
    capsys.readouterr()


def test_the_data_set_is_prepared_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a text.txt").write_bytes(("Größe und Maß. " * 60).encode("latin-1"))
    Path("val.txt").write_bytes(("Maß und Größe. " * 9).encode("latin-1"))
    dataset = attnlm.prepare(
        "a text.txt",
        tokenizer="bpe:260",
        val_file="val.txt",
        encoding="latin-1",
        data_dir="else where",
    )
    run = attnlm.train(dataset.path, model="bigram", steps=1, block_size=4, seed=1, threads=1)
    prepare, train = report(run).commands
    shutil.rmtree("else where")
    typed(prepare, monkeypatch)
    typed(train, monkeypatch)
    again = open_run(None)
    assert again.config == run.config and again.dataset == run.dataset
    capsys.readouterr()


def test_several_sources_are_prepared_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b c.txt").write_bytes(b"the second\r\n" * 9)
    Path("a.txt").write_bytes(b"the first\r" * 9)
    dataset = attnlm.prepare(["b c.txt", "a.txt"], newlines="unix")
    shutil.rmtree("data")
    typed(prepare_command(dataset), monkeypatch)
    again = attnlm.open_dataset(dataset.name)
    assert again.train_sha256 == dataset.train_sha256 and again.newlines == "unix"
    capsys.readouterr()


def test_a_text_from_a_pipe_has_a_place(trained: Path, tmp_path: Path) -> None:
    dataset = attnlm.open_dataset(trained / "data" / "foxes")
    piped = prepare_command(replace(dataset, source="-", sources=("-",)))
    assert piped.startswith("attnlm prepare - --tokenizer char") and piped.endswith(" < TEXT")


# --- The page -------------------------------------------------------------------------------------


def test_it_is_one_file_that_asks_for_nothing_else(runs: Path) -> None:
    found = of("transformer", runs)
    page = report_page(found)
    for _, attributes in elements(page).found:
        assert "src" not in attributes
        assert (attributes.get("href") or "data:,").startswith(("data:,", "#"))
    text = html(page)
    assert not re.search(
        r"https?:(?!//www\.w3\.org/)|@import|url\((?!#|data:image/png;|\$\{strip)", text
    )
    assert page == report_page(found)


def test_what_the_model_said_is_no_markup(runs: Path) -> None:
    found = of("transformer", runs)
    said = "</script><script>alert(1)</script><b>&amp;"
    snapshots = [replace(snapshot, text=said) for snapshot in found.snapshots]
    names = [name for name, _ in elements(report_page(replace(found, snapshots=snapshots))).found]
    assert names.count("script") == 5
    assert (
        json.loads(elements(report_page(replace(found, snapshots=snapshots))).scripts[0])[
            "snapshots"
        ][0]["text"]
        == said
    )


def test_what_can_not_be_seen_has_a_sign(runs: Path) -> None:
    found = of("transformer", runs)
    snapshots = [replace(snapshot, text="\na\x00\tb\r\n c") for snapshot in found.snapshots]
    page = report_page(replace(found, snapshots=snapshots))
    assert json.loads(elements(page).scripts[0])["snapshots"][0]["text"] == "\na\\x00⇥b\n c"
    assert '<pre id="said">\n\na' in html(page) and "⏎ a\\x00⇥b⏎  c" in html(page)


def opacity(content: bytes) -> np.ndarray[Any, Any]:
    from matplotlib.image import imread

    picture_HW4 = imread(io.BytesIO(content), format="png")
    assert (picture_HW4[..., :3] == 0).all()
    shares: np.ndarray[Any, Any] = np.rint(picture_HW4[..., 3] * 255)
    return shares


def test_a_film_is_a_picture_of_its_maps() -> None:
    random = np.random.default_rng(1)
    maps = random.random((3, 5, 5), np.float32)
    alpha = opacity(strip(maps))
    cells = alpha[3::6, 3::6]
    np.testing.assert_array_equal(cells, np.rint(np.concatenate(maps, 1) * 255))
    np.testing.assert_array_equal(alpha, cells.repeat(6, 0).repeat(6, 1))


def test_the_score_on_the_token_before_is_that_of_heads() -> None:
    weights = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.125, 0.375]], np.float32)
    assert previous_token_score(weights) == pytest.approx((0.25 + 0.125) / 2)


def test_of_many_heads_the_films_are_of_those_with_the_largest_scores(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.see.report_page._MOST_FILMS", 3)
    found = of("transformer", runs)
    last = found.snapshots[-1].maps
    assert last is not None
    scores = {
        f"layer {i + 1} head {j + 1}": previous_token_score(last[i, j])
        for i in range(2)
        for j in range(2)
    }
    page = report_page(found)
    films = json.loads(elements(page).scripts[0])["films"]
    best = sorted(scores, key=lambda name: scores[name])[1:]
    assert {film["name"] for film in films} == set(best)
    assert "Of 4 heads, these are the 3 with the largest" in html(page)


def test_an_imported_run_has_a_page_of_what_it_is(runs: Path, tmp_path: Path, browser: Any) -> None:
    shutil.copytree(runs / "transformer", tmp_path / "theirs")
    for name in ("metrics.jsonl", "ticker.jsonl"):
        (tmp_path / "theirs" / name).unlink()
    run = replace(open_run(tmp_path / "theirs"), imported_from="a/folder")
    found = report(run, windows=2)
    assert found.best is None and "own first words, since it has no data set" in found.text_is
    assert found.heads is not None and not found.heads.has_text
    assert found.commands == [f"attnlm import a/folder --name theirs --checkpoint-dir {tmp_path}"]
    page = html(report_page(found))
    for shown in ("The logit lens", "Heads by measurement", "imported from", "What it writes"):
        assert shown in page
    for hidden in ("While it learned", "best loss", "SHA-256", "learning rate"):
        assert hidden not in page
    (tmp_path / "page.html").write_text(page)
    check_fits(browser, tmp_path / "page.html", "report-imported", "dark")


def large(runs: Path) -> Report:
    """As of a run of 6 layers of 6 heads, evaluated 100 times, that reads 256 tokens."""
    found = of("transformer", runs)
    random = np.random.default_rng(1)
    length, vocabulary = 256, [chr(33 + i) for i in range(65)]
    scores = random.normal(size=(6, 6, length, length)).astype(np.float32) * 3
    scores[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    probabilities = random.dirichlet(np.ones(65), length).astype(np.float32)
    tokens = [vocabulary[i % 65] for i in range(length)]
    maps = weights[..., :24, :24]
    maps = maps / maps.sum(-1, keepdims=True)
    records = [{**found.records[-1], "step": step} for step in range(100)]
    assert found.heads is not None
    head = found.heads.heads[0]
    heads = [replace(head, layer=layer, head=n) for layer in range(6) for n in range(6)]
    return replace(
        found,
        records=records,
        snapshots=[
            Snapshot(step, "a line of about eighty characters" * 3, maps) for step in range(100)
        ],
        passage=tokens[:24],
        ids=[i % 65 for i in range(length)],
        attention=Attention("run", "transformer", tokens, vocabulary, weights, probabilities),
        lens=[
            LensRow(
                f"layer {n}", np.ones((length, 5), np.int64), np.full((length, 5), np.float32(0.2))
            )
            for n in range(7)
        ],
        heads=replace(found.heads, heads=heads),
    )


def test_a_large_model_and_a_long_text_stay_below_3_mb(runs: Path) -> None:
    page = report_page(large(runs))
    assert len(page) < 3_000_000, f"{len(page):,} bytes"
    data = json.loads(elements(page).scripts[0])
    steps = [snapshot["step"] for snapshot in data["snapshots"]]
    assert len(steps) < 100 and steps[0] == 0 and steps[-1] == 99
    assert f"{len(steps)} of the 100 are shown" in html(page)


# --- The command ----------------------------------------------------------------------------------


def test_the_command_writes_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(runs.parent)
    typed("attnlm report tied --text 'the fox'", monkeypatch)
    printed = capsys.readouterr()
    assert printed.out == f"{Path('checkpoints/tied/report.html')}\n"
    page = (runs / "tied" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "tied" in printed.err
    out = tmp_path / "page.html"
    typed(f"attnlm report bigram --json -o {shlex.quote(str(out))}", monkeypatch)
    facts = json.loads(capsys.readouterr().out)
    assert facts["output"] == str(out) and out.is_file() and facts["heads"] == []
    assert facts["commands"][1].startswith("attnlm train foxes --model bigram")


def test_what_is_wrong_is_said_and_nothing_is_written(runs: Path, tmp_path: Path) -> None:
    cwd = runs.parent
    fails("report", "tied", "-o", "no/such.html", cwd=cwd, code=1, says="no folder", hints="create")
    weights = (runs / "tied" / "best.safetensors").read_bytes()
    target = str(Path("checkpoints") / "tied" / "best.safetensors")
    fails("report", "tied", "-o", target, cwd=cwd, code=2, says="--output", hints=".html")
    assert (runs / "tied" / "best.safetensors").read_bytes() == weights
    odd = tmp_path.parent / "odd"
    (odd / "folder.html").mkdir(parents=True)
    (odd / "link.html").symlink_to(runs / "tied" / "config.json")
    os.mkfifo(odd / "pipe.html")
    for name in ("folder.html", "link.html", "pipe.html"):
        place = str(odd / name)
        fails("report", "tied", "-o", place, cwd=cwd, code=1, says="regular file", hints="another")
    fails("report", "tide", cwd=cwd, code=1, says="no run is called", hints="tied")
    fails("report", "tied", "--text", "Ω", cwd=cwd, code=1, says="Ω", hints="")
    fails("report", "tied", "--text", "", cwd=cwd, code=2, says="empty", hints="character")
    fails("report", "tied", "--windows", "0", cwd=cwd, code=2, says="--windows", hints="1")
    fails("report", "tied", "--text", "a" * 17, cwd=cwd, code=1, says="17 tokens", hints="16")
    shutil.copytree(runs / "wide-head", tmp_path / "checkpoints" / "young")
    (tmp_path / "checkpoints" / "young" / "metrics.jsonl").unlink()
    fails("report", "young", cwd=tmp_path, code=1, says="no evaluations", hints="--resume")
    assert not list(tmp_path.rglob("*.html"))


# --- In a browser ---------------------------------------------------------------------------------


@pytest.fixture(name="page", scope="module")
def a_page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    found = of("transformer", runs, windows=4, ablate=True)
    path.write_bytes(report_page(found))
    return path, found


def test_the_lens_follows_the_chosen_token(browser: Any, page: tuple[Path, Report]) -> None:
    path, found = page
    with opened(browser, path) as view:
        for key, place in (("Home", 0), ("End", len(found.ids) - 1)):
            view.focus("#text [aria-pressed=true]")
            view.keyboard.press(key)
            assert f"token {place + 1}," in view.inner_text("#lens-token")
            for number, row in enumerate(found.lens):
                shown = view.locator("#lens-at tr").nth(number).locator("small")
                percents = [int(text) for text in shown.all_text_contents()]
                assert percents == np.rint(100 * row.probabilities[place]).tolist()


def test_scores_are_heat_maps(browser: Any, page: tuple[Path, Report]) -> None:
    path, found = page
    assert found.heads is not None
    with opened(browser, path) as view:
        maps = view.locator(".heat")
        assert maps.count() == len(PATTERNS)
        for number, pattern in enumerate(PATTERNS):
            cells = maps.nth(number).locator("td")
            wanted = [head.scores[pattern] for head in found.heads.heads]
            assert cells.all_text_contents() == [f"{100 * score:.0f}" for score in wanted]
            tints = cells.evaluate_all("all => all.map(c => +c.style.getPropertyValue('--share'))")
            assert tints == pytest.approx(wanted, abs=0.001)


def test_the_slider_moves_mark_line_and_map(browser: Any, page: tuple[Path, Report]) -> None:
    path, found = page
    last = len(found.snapshots) - 1
    with opened(browser, path, viewport={"width": 1280, "height": 900}) as view:

        def middle(shown: Any) -> float:
            box = shown.bounding_box()
            return float(box["x"] + box["width"] / 2)

        def shows(number: int) -> None:
            snapshot = found.snapshots[number]
            assert view.locator("#said").text_content() == snapshot.text
            assert view.locator("#lines .now th").text_content() == str(snapshot.step)
            assert f"step {snapshot.step}" in view.locator("#when").text_content()
            assert view.get_attribute("#snapshot", "aria-valuetext").startswith(
                f"step {snapshot.step}"
            )
            assert f"step {snapshot.step}" in view.locator("#frames .now").text_content()
            assert f"step {snapshot.step}:" in view.locator("#large-caption").text_content()
            first, end = (
                middle(view.locator("#curve text", has_text=re.compile(f"^{x}$"))) for x in (0, 30)
            )
            wanted = first + (end - first) * snapshot.step / 30
            assert middle(view.locator("#mark")) == pytest.approx(wanted, abs=1)

        shows(last)
        view.focus("#snapshot")
        view.keyboard.press("Home")
        shows(0)
        view.keyboard.press("ArrowRight")
        shows(1)
        view.locator("#frames figure").nth(4).click()
        shows(4)
        view.locator("#lines tbody tr").nth(2).click()
        shows(2)
        end = middle(view.locator("#curve text", has_text=re.compile("^30$")))
        picture = view.locator("#curve svg")
        picture.click(position={"x": end - picture.bounding_box()["x"], "y": 40})
        shows(last)


def test_another_heads_film(browser: Any, page: tuple[Path, Report]) -> None:
    path, found = page
    scores = {
        (layer, head): [
            previous_token_score(m.maps[layer, head]) for m in found.snapshots if m.maps is not None
        ]
        for layer in range(2)
        for head in range(2)
    }
    best = max(scores, key=lambda place: scores[place][-1])
    with opened(browser, path) as view:
        assert view.input_value("#head") == str(2 * best[0] + best[1])
        for number, (place, expected) in enumerate(scores.items()):
            view.select_option("#head", str(number))
            shown = [float(text) for text in view.locator("#frames b").all_text_contents()]
            assert shown == pytest.approx(expected, abs=0.008)
            assert f"layer {place[0] + 1} head {place[1] + 1}" in view.text_content(
                "#large-caption"
            )
            url = view.evaluate("document.getElementById('film').style.getPropertyValue('--strip')")
            alpha = opacity(base64.b64decode(url.partition("base64,")[2].rstrip(")\"'")))
            maps = np.concatenate([m.maps[place] for m in found.snapshots if m.maps is not None], 1)
            np.testing.assert_allclose(alpha[3::6, 3::6] / 255, maps, atol=0.003)


def test_on_paper_nothing_is_cut_off_and_nothing_is_tiny(
    browser: Any, page: tuple[Path, Report]
) -> None:
    a4 = 688  # pixels between the margins
    with opened(browser, page[0], viewport={"width": a4, "height": 1000}) as view:
        view.emulate_media(media="print")
        view.evaluate(
            "document.querySelectorAll('.lens td, .lens thead th').forEach(cell => {"
            " (cell.querySelector('span') ?? cell).textContent = 'orrowing' })"
        )
        beyond = view.evaluate(
            "[...document.querySelectorAll('main *')].filter(element =>"
            f" element.getBoundingClientRect().right > {a4} + 1).length"
        )
        sizes = view.locator(".rows span, .lens td, .scores td").evaluate_all(
            "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
        )
        curve = view.locator("#curve svg").bounding_box()
    assert beyond == 0
    assert min(sizes) >= 7.5 * 96 / 72
    assert curve["width"] == 448


@pytest.mark.parametrize(("width", "smallest"), [(360, 11.5), (1280, 15)])
def test_the_tokens_beside_the_map_are_readable_and_beside_their_rows(
    browser: Any, page: tuple[Path, Report], width: int, smallest: float
) -> None:
    with opened(browser, page[0], viewport={"width": width, "height": 900}) as view:
        rows = view.locator(".rows span").evaluate_all(
            "spans => spans.map(span => [parseFloat(getComputedStyle(span).fontSize),"
            " ...['top', 'bottom'].map(side => span.getBoundingClientRect()[side])])"
        )
        box = view.locator("#large").bounding_box()
    cell = box["height"] / len(rows)
    assert box["height"] == pytest.approx(box["width"], abs=1)
    for number, (size, top, bottom) in enumerate(rows):
        assert size >= smallest
        middle = box["y"] + (number + 0.5) * cell
        assert (top + bottom) / 2 == pytest.approx(middle, abs=1) and bottom - top > size


def test_the_map_that_is_large_is_that_of_the_step(browser: Any, page: tuple[Path, Report]) -> None:
    """By its pixels: where a weight is large, there is more tint."""
    path, found = page
    png = pytest.importorskip("matplotlib.image")
    with opened(browser, path, viewport={"width": 1280, "height": 900}) as view:
        view.focus("#snapshot")
        for key, snapshot in (("Home", found.snapshots[0]), ("End", found.snapshots[-1])):
            view.keyboard.press(key)
            place = divmod(int(view.input_value("#head")), 2)
            photograph(view, "report-map", "#large")
            from tests.browser import SCREENSHOTS

            pixels = png.imread(SCREENSHOTS / "report-map.png")[..., 0]
            assert snapshot.maps is not None
            weights = snapshot.maps[place]
            length = len(weights)
            middle = ((np.arange(length) + 0.5) / length * len(pixels)).astype(int)
            tint = 1 - pixels[np.ix_(middle, middle)]
            lower = np.tril_indices(length)
            assert np.corrcoef(tint[lower], weights[lower])[0, 1] > 0.98


def test_it_is_whole_without_scripts_and_on_paper(browser: Any, page: tuple[Path, Report]) -> None:
    path, found = page
    with opened(browser, path, java_script_enabled=False) as view:
        shown = view.inner_text("body")
        for snapshot in found.snapshots:
            assert " ".join(snapshot.text.replace("\n", "⏎ ").split()) in " ".join(shown.split())
        assert not view.is_visible("#snapshot") and not view.is_visible("#head")
        assert view.is_visible("#large") and view.locator("#frames .map").count() == 11
        assert view.is_visible("#next .candidate >> nth=0")
        view.emulate_media(media="print")
        lines = view.locator("#lines").bounding_box()
        around = view.locator(".lines").bounding_box()
        assert lines["height"] <= around["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_phone_desk_and_paper(
    scheme: str, browser: Any, page: tuple[Path, Report], runs: Path, tmp_path: Path
) -> None:
    check_fits(browser, page[0], "report", scheme)
    (tmp_path / "bigram.html").write_bytes(report_page(of("bigram", runs)))
    check_fits(browser, tmp_path / "bigram.html", "report-bigram", scheme)


def test_a_large_page_fits_too(browser: Any, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "large.html").write_bytes(report_page(large(runs)))
    check_fits(browser, tmp_path / "large.html", "report-large", "light")


def test_a_run_of_one_evaluation_has_no_curve(
    browser: Any, page: tuple[Path, Report], tmp_path: Path
) -> None:
    found = page[1]
    one = replace(found, records=found.records[:1], snapshots=found.snapshots[:1])
    (tmp_path / "one.html").write_bytes(report_page(one))
    with opened(browser, tmp_path / "one.html") as view:
        assert "A curve needs two evaluations or more" in view.inner_text("body")
        view.focus("#snapshot")
        view.keyboard.press("ArrowLeft")
        assert view.locator("#frames figure").count() == 1
        view.select_option("#head", "0")
        assert "layer 1 head 1, step 0" in view.inner_text("#large-caption")


def test_the_checkpoint_is_what_speaks(runs: Path) -> None:
    found = of("multi-head", runs, checkpoint="last")
    model, _ = load_model(found.run, checkpoint="last", device="cpu")
    assert "read by the last checkpoint" in html(report_page(found))
    assert model.vocab_size == found.attention.probabilities.shape[1]
    with pytest.raises(AttnlmError, match="`checkpoint`"):
        of("multi-head", runs, checkpoint="worst")
