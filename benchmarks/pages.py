"""The pages of a large model: their size, the time to write them, and to draw them in Chromium."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.data.prepare import prepare
from attnlm.model.inspection import count_parameters
from attnlm.model.language_model import build_model
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.create_run import create_run
from attnlm.runs.run import Run
from benchmarks.table import Row, attnlm, seconds_of

SHAPE = {"layers": 12, "heads": 12, "embed_dim": 768, "block_size": 1024}
_ROUNDS = 5
_DRAWN = """new Promise(done => requestAnimationFrame(() =>
    setTimeout(() => done(performance.now()))))"""


def pages(dataset: Dataset, text: Path) -> list[Row]:
    """A row for `attend` and for `report`, each over 1,024 tokens."""
    folder = dataset.path.parent
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
    """As if GPT-2's shape had been imported, with random weights of sharp heads."""
    torch.manual_seed(1)
    config = resolve({"model": "gpt2", **SHAPE}, {})
    model = build_model(config.model, dataset.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
            if "query" in name:
                parameter.mul_(4)
    run = create_run(config, dataset, count_parameters(model), name=None, checkpoint_dir=folder)
    save_checkpoint(run.best, dict(model.named_parameters()), {"step": 0})
    run = replace(run, imported_from="nowhere")
    run.save_config()
    return run


def _milliseconds_until_drawn(page: Path) -> float:
    """From the start of the navigation until after the first frame with all maps."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1280, "height": 900})
        view.goto(page.as_uri())
        drawn = float(view.evaluate(_DRAWN))
        time.sleep(0.2)
        browser.close()
    return drawn
