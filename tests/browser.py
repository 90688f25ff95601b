"""A real browser for the tests of pages, its network off; pictures of what it shows are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
PHONE = {"width": 360, "height": 740}


def launched() -> Iterator[Any]:
    """Start headless Chromium for a fixture, or skip the tests if it is not installed."""
    driver = pytest.importorskip("playwright.sync_api", reason="there is no playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Elements(HTMLParser):
    """Every element's name and attributes, the scripts' contents, and the text around them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def elements(html: bytes) -> Elements:
    parser = Elements()
    parser.feed(html.decode())
    return parser


def asks_for_nothing(page: bytes) -> None:
    """The page has no address of anything but itself."""
    for _, attributes in elements(page).found:
        assert "src" not in attributes
        assert (attributes.get("href") or "data:,").startswith(("data:,", "#"))
    elsewhere = r"https?:(?!//www\.w3\.org/)|@import|url\((?!#)"
    assert not re.search(elsewhere, page.decode())


@contextmanager
def opened(
    browser: Any, page: Path, width: int = 1280, height: int = 900, **how: Any
) -> Iterator[Any]:
    """Open a page from its file. It must never log an error or request anything but itself."""
    context = browser.new_context(
        offline=True, **{"viewport": {"width": width, "height": height}, **how}
    )
    view = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    view.on("console", lambda message: complaints.append(message.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("dialog", lambda dialog: complaints.append(dialog.message))
    view.on("dialog", lambda dialog: dialog.dismiss())
    view.on("request", lambda request: asked.append(request.url))
    try:
        view.goto(page.as_uri())
        yield view
    except BaseException as error:
        error.add_note(f"The page logged {complaints}.")
        raise
    else:
        assert complaints == []
        assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    finally:
        context.close()


def open_until_the_end(browser: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Return, for a fixture, a function that opens a page, given as its file or as its content."""
    with ExitStack() as stack:

        def open_page(page: Path | bytes, **how: Any) -> Any:
            if isinstance(page, bytes):
                content, page = page, folder / f"page-{len(browser.contexts)}.html"
                page.write_bytes(content)
            return stack.enter_context(opened(browser, page, **how))

        yield open_page


def until(view: Any, condition: str) -> None:
    """Wait until a condition in JavaScript holds. Playwright's own way needs `eval` in the page,
    which the page's security policy forbids."""
    for _ in range(600):
        if view.evaluate(condition):
            return
        view.wait_for_timeout(50)
    raise AssertionError(condition)


def check_fits(browser: Any, page: Path, name: str) -> None:
    """Check that on a phone only marked regions scroll sideways; check light and print colours."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with opened(browser, page, **PHONE) as view:
        for device, viewport in (("phone", PHONE), ("desk", {"width": 1280, "height": 900})):
            view.set_viewport_size(viewport)
            for scheme in ("light", "dark"):
                view.emulate_media(color_scheme=scheme, media="screen")
                assert view.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
                paper, ink = (brightness(view, side) for side in ("backgroundColor", "color"))
                assert (paper > ink) == (scheme == "light")
                if (device, scheme) in (("phone", "light"), ("desk", "dark")):
                    picture = SCREENSHOTS / f"{name}-{device}-{scheme}.png"
                    view.screenshot(path=str(picture), full_page=True)
                view.emulate_media(media="print")
                printed = view.evaluate("getComputedStyle(document.body).backgroundColor")
                assert printed == "rgb(255, 255, 255)"
                assert brightness(view, "color") < 200


def brightness(view: Any, side: str) -> int:
    """Return the brightness of the body's text or background, from 0 to 765."""
    colour = view.evaluate(f"getComputedStyle(document.body).{side}")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def darkness(view: Any, canvas: str) -> np.ndarray[Any, Any]:
    """Return each pixel's distance from the colour of zero attention; NaN if masked."""
    script = """c => {
      const copy = new OffscreenCanvas(c.width, c.height).getContext("2d");
      copy.drawImage(c, 0, 0);
      return [c.width, ...copy.getImageData(0, 0, c.width, c.height).data];
    }"""
    width, *found = view.locator(canvas).first.evaluate(script)
    pixels = np.array(found, float).reshape(-1, width, 4)
    return np.where(pixels[..., 3] == 255, 765 - pixels[..., :3].sum(-1), np.nan)
