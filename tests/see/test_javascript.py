"""The JavaScript modules of pages: node reads and links them, and pages define one global name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attnlm.see import page
from attnlm.see.model_page import play_page
from attnlm.see.train_page import train_page
from tests.browser import opened
from tests.models import small_model
from tests.see.test_model_page import shown
from tests.see.test_train_page import TEXT

FOLDER = Path(page.__file__).parent / "pages"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))
ENTRIES = ("attend_page.js", "play_page.js", "report_page.js", "train_page.js", "train_worker.js")
"""What pages run; all else is imported."""
LINKING = """
import {readFileSync} from "node:fs";
import {SourceTextModule} from "node:vm";

const modules = Object.fromEntries(process.argv.slice(1).map((name) => [
  `./${name}`, new SourceTextModule(readFileSync(name, "utf8"), {identifier: name}),
]));
for (const module of Object.values(modules)) {
  if (module.status === "unlinked") await module.link((name) => modules[name]);
}
"""


def test_all_modules_belong_to_a_page() -> None:
    assert sorted(page._with_imports(*ENTRIES)) == SCRIPTS


def test_modules_are_valid_and_import_what_others_export() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    flags = ["--experimental-vm-modules", "--no-warnings", "--input-type=module", "--eval"]
    command = [node, *flags, LINKING, "--", *SCRIPTS]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_pages_add_one_global_name(browser: Any, tmp_path: Path) -> None:
    def global_names(content: bytes) -> set[str]:
        (tmp_path / "page.html").write_bytes(content)
        with opened(browser, tmp_path / "page.html") as view:
            return set(view.evaluate("Object.getOwnPropertyNames(globalThis)"))

    usual = global_names(b"<!doctype html>")
    model = shown("multi-head", small_model("multi-head").float())
    for content in (play_page([model]), train_page(TEXT)):
        assert global_names(content) - usual == {"attnlm"}
