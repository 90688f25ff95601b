"""`python docs/gallery.py`: trains three models on `tales` and writes each as a page in gallery/.

train.html is a page that trains on the same text. `python docs/gallery.py --render` trains nothing:
it takes the models out of the pages and writes the pages again, after a change of what a page looks
like. play.png is a picture of one of them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import attnlm
from attnlm.see.model_page import first_text, play_page, run_data
from attnlm.see.train_page import train_page, training_text

FOLDER = Path(__file__).parent / "gallery"
PAGES: dict[str, dict[str, Any]] = {
    "bigram": {"model": "bigram"},
    "multi-head": {"model": "multi-head"},
    "transformer": {"model": "transformer", "embed_dim": 64, "layers": 2},
}
"""The pages' names and the settings of their models; all else is by default, with seed 1."""
TRAIN = FOLDER / "train.html"


def main() -> None:
    """Write the pages and the picture."""
    is_known = "--render" in sys.argv
    TRAIN.write_bytes(training())
    for name in PAGES:
        path = FOLDER / f"{name}.html"
        path.write_bytes(play_page(**data_of(path)) if is_known else trained(name))
    _picture(FOLDER / "multi-head.html", FOLDER / "play.png")


def trained(name: str) -> bytes:
    """Return the page of a model that is trained now."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = attnlm.prepare("tales", data_dir=folder)
        run = attnlm.train(dataset, **PAGES[name], seed=1, name=name, checkpoint_dir=folder)
        number_type = "f16" if run.parameters > 50_000 else "f32"
        return play_page([run_data(run, run.checkpoint(), number_type)], first_text([run]))


def training() -> bytes:
    """Return the page that trains."""
    with tempfile.TemporaryDirectory() as folder:
        return train_page(training_text(attnlm.prepare("tales", data_dir=folder)))


def data_of(page: Path) -> Any:
    """Return the JSON values in a page: its models, its first text and, if it trains, its text."""
    content = page.read_text(encoding="utf-8")
    return json.loads(re.findall(r'<script [^>]*id="data">(.*?)</script>', content, re.DOTALL)[0])


def _picture(page: Path, path: Path) -> None:
    """Photograph the page after a head was switched off: the bars and texts before and after."""
    import shutil

    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1300, "height": 900})
        view.goto(page.as_uri())
        view.locator("#thumbnails small").last.filter(has_text="%").wait_for()
        view.fill("#seed", "1")
        view.click("#run")
        view.locator(".sampled").nth(199).wait_for()
        view.click("#switch")
        view.locator(".sampled").nth(399).wait_for()
        view.locator("#thumbnails .off").first.wait_for()
        view.mouse.move(0, 0)
        view.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    main()
