"""Pages in Chromium: the report of a large model, and pages that run a model.

Measures the size of reports, and the time to write and to draw them; and of pages that run a
model, on one core: tokens per second past the context, the time from a keystroke until next tokens
and heads follow, and the longest time for which the page does not answer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model.inspection import parameter_count
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import create_run
from attnlm.runs.run import Run
from attnlm.see.model_page import model_data, play_page
from attnlm.tokens.tokenizer import CharTokenizer
from benchmarks.table import Row, attnlm, seconds_of
from tests.models import parts_of

SHAPE = {"layers": 12, "heads": 12, "embed_dim": 768, "block_size": 1024}
_ROUNDS = 5
_DRAWN = """new Promise(done => requestAnimationFrame(() =>
    setTimeout(() => done(performance.now()))))"""


PLAYED: dict[str, Settings] = {
    "multi-head": {"model": "multi-head"},
    "transformer": {"model": "transformer"},
    "transformer 4 × 128, context 64": {
        "model": "transformer",
        "layers": 4,
        "embed_dim": 128,
        "heads": 4,
        "block_size": 64,
    },
}
_GENERATED = """async () => {
  const began = performance.now();
  await attnlm.models[0].generate({ids: [0], tokens: 1000, seed: 1});
  return 1e6 / (performance.now() - began);
}"""
_TYPED = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const {models: [model], modelPage, modules} = attnlm;
  const {page} = modules["components.js"];
  const {eventLoop} = modules["yield_to_event_loop.js"];
  const isShown = (length) => !modelPage.isEdited && modelPage.headsView.T === length;
  const block = model.architecture.block_size;
  const times = [];
  const long = [];
  new PerformanceObserver((list) => long.push(...list.getEntries().map((task) => task.duration)))
    .observe({type: "longtask"});
  for (const sign of "abcdefghijklmnopqrstuvwxyzabcdefghijklmn") {
    const began = performance.now();
    page.prompt.value += sign;
    page.prompt.dispatchEvent(new Event("input"));
    while (!isShown(Math.min(page.prompt.value.length, block))) await eventLoop();
    await frame();
    times.push(performance.now() - began);
    while (modelPage.isBusy) await new Promise((done) => setTimeout(done, 5));
  }
  page.run.click();
  const isBusy = () => modelPage.generation || modelPage.isBusy;
  while (isBusy()) await new Promise((done) => setTimeout(done, 20));
  return [times, Math.max(0, ...long)];
}"""


def pages(dataset: Dataset, text: Path) -> list[Row]:
    """A row for `attend` and `report`, each over 1,024 tokens, and for each of PLAYED."""
    folder = dataset.path.parent
    return [*_recorded(text, folder), *(_played(name, folder) for name in PLAYED)]


def _played(name: str, folder: Path) -> Row:
    torch.manual_seed(1)
    model = parts_of(resolve(PLAYED[name])).build(65)
    tokenizer = CharTokenizer("".join(map(chr, range(58, 123))))
    shown = model_data(name, model.architecture, model.state_dict(), tokenizer, "")
    page = folder / "play.html"
    page.write_bytes(play_page([shown]))
    with _opened(page, cores=1) as view:
        speed = statistics.median(float(view.evaluate(_GENERATED)) for _ in range(_ROUNDS))
        times, longest = view.evaluate(_TYPED)
    typed = f"keystroke {statistics.median(times):.0f} ms (at most {max(times):.0f})"
    task = f"longest task {longest:.0f} ms" if longest else "no task of 50 ms"
    return Row(f"{name} in its page, one core", f"{speed:,.0f} tokens/s, {typed}, {task}", "", "")


def _recorded(text: Path, folder: Path) -> list[Row]:
    byte_pairs = prepare(text, tokenizer="gpt2", data_dir=folder)
    run = _untrained(byte_pairs, folder)
    passage = run.tokenizer.decode(byte_pairs.val[: SHAPE["block_size"]].tolist())
    how = {"attend": ("attend", passage, str(run.path)), "report": ("report", str(run.path))}
    rows = []
    for name, words in how.items():
        page = folder / f"{name}.html"
        words = (*words, *(("--text", passage) if name == "report" else ()))
        seconds = seconds_of(attnlm(*words, "--output", str(page)))
        drawn = statistics.median(_milliseconds_until_drawn(page) for _ in range(_ROUNDS))
        size = page.stat().st_size / 1e6
        ours = f"{size:.1f} MB, written in {seconds:.0f} s, drawn in {drawn:.0f} ms"
        rows.append(Row(f"`{name}` page, 12 × 12 heads, 1,024 tokens, 50,257 ids", ours, "", ""))
    return rows


def _untrained(dataset: Dataset, folder: Path) -> Run:
    """Make a run of GPT-2's shape with random weights and sharp heads."""
    torch.manual_seed(1)
    config = resolve({"model": "gpt2", **SHAPE}, {})
    model = parts_of(config).build(dataset.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
            if "query" in name:
                parameter.mul_(4)
    parameters = parameter_count(config.spec, dataset.vocab_size)
    run = create_run(config, dataset, parameters, name=None, checkpoint_dir=folder)
    save_checkpoint(run.best, dict(model.named_parameters()), {"step": 0})
    run = replace(run, imported_from="nowhere")
    run.save_config()
    return run


def _milliseconds_until_drawn(page: Path) -> float:
    """Return the time from the start of the navigation until after the first frame."""
    with _opened(page) as view:
        drawn = float(view.evaluate(_DRAWN))
        time.sleep(0.2)
    return drawn


@contextlib.contextmanager
def _opened(page: Path, cores: int | None = None) -> Iterator[Any]:
    """Open a page in a new Chromium that may use `cores` cores."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    usual = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(usual)[:cores])  # for the processes that start now
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            view = browser.new_page(viewport={"width": 1280, "height": 900})
            view.goto(page.as_uri())
            yield view
            browser.close()
    finally:
        os.sched_setaffinity(0, usual)
