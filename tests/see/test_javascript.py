"""The JavaScript modules of pages: syntax, names, imports and style. No linter is needed for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attnlm.see import page
from attnlm.see.model_page import play_page
from attnlm.see.train_page import train_page
from tests.browser import opened
from tests.javascript import Module, read
from tests.models import small_model
from tests.see.test_model_page import shown
from tests.see.test_train_page import TEXT

FOLDER = Path(page.__file__).parent / "pages"
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.js"))}
MODULES = {name: read(source) for name, source in SCRIPTS.items()}
ENTRIES = ("attend_page.js", "play_page.js", "report_page.js", "train_page.js", "train_worker.js")
"""What pages run; all else is imported."""
FROM_OUTSIDE = {
    "serve": "the code of the worker",
    "present": "test_model_page.py",
    "learningRate": "test_train_page.py",
}
"""Exported names that no module imports, and where they are used."""
MOST_LINES = 450
MOST_CHARACTERS = 120
GLOBALS = set(
    re.findall(
        r"\w+",
        """
    addEventListener Array ArrayBuffer atob BigInt BigUint64Array Blob Boolean btoa
    clearInterval clearTimeout document Error Float32Array Float64Array getComputedStyle
    globalThis ImageData Infinity innerHeight Int32Array JSON Map matchMedia Math
    MessageChannel Number Object parseInt performance postMessage Promise RegExp Set
    setInterval setTimeout String TextDecoder TextEncoder Uint16Array Uint32Array Uint8Array
    Uint8ClampedArray URL Worker
        """,
    )
)
"""What browsers and workers define, as far as the modules use it."""

each_module = pytest.mark.parametrize("name", MODULES)


@each_module
def test_each_name_is_declared_imported_or_of_the_browser(name: str) -> None:
    module = MODULES[name]
    assert module.used - module.declared - GLOBALS == set()


@each_module
def test_imports_are_exported_there_and_used_here(name: str) -> None:
    module = MODULES[name]
    for imported, file in module.imports.items():
        assert imported in MODULES[file].exports, f"{file} does not export {imported}"
    assert module.imports.keys() <= module.used


@each_module
def test_what_a_module_declares_is_used(name: str) -> None:
    module = MODULES[name]
    imported = {one for other in MODULES.values() for one in other.imports}
    unused = module.declared - module.used - module.exports - {"_"}
    assert {one for one in unused if len(re.findall(rf"\b{one}\b", SCRIPTS[name])) < 2} == set()
    assert module.exports <= imported | FROM_OUTSIDE.keys()


def test_all_modules_belong_to_a_page_and_imports_go_one_way() -> None:
    order = page._with_imports(*ENTRIES)
    assert sorted(order) == sorted(MODULES)
    for place, name in enumerate(order):
        assert {order.index(file) for file in MODULES[name].imports.values()} <= set(range(place))


def test_the_worker_needs_no_document() -> None:
    for name in page._with_imports("train_worker.js"):
        assert MODULES[name].used.isdisjoint({"document", "getComputedStyle", "matchMedia"}), name


@each_module
def test_lines_and_modules_are_short_and_declare_one_variable_at_a_time(name: str) -> None:
    lines = SCRIPTS[name].splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_CHARACTERS] == []
    assert MODULES[name].most_declared <= 1
    assert "Object.assign(this" not in SCRIPTS[name]


def test_the_stylesheet_has_short_lines() -> None:
    lines = (FOLDER / "page.css").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > MOST_CHARACTERS] == []


@each_module
def test_node_reads_each_module(name: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    (tmp_path / "module.mjs").write_text(SCRIPTS[name], encoding="utf-8")
    command = [node, "--check", "module.mjs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
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


READ = """\
import {first, second} from "./other.js";
import {
  third,
} from "./another.js";

/* A `comment` of names. */
export class Shape extends Base {
  field = first(1); // trailing names
  static of({a, b: renamed = second}, ...rest) { return new Shape(a, renamed, rest); }
  get size() { return this.width * depth; }
}
export const text = `a ${third(`b ${inner}`)} c`;
let x = 1, [y, {z}] = [/[/"]x/.test(text), {z: "key: value"}];
for (let i = 0, j = 1; i < j; i++) x = i ? y : z;
try { missing(x); } catch (error) { console.log(error, {text, key: x}); }
"""


def words(text: str) -> set[str]:
    return set(text.split())


def test_the_parser_finds_the_names_of_a_javascript_module() -> None:
    expected = Module(
        imports={"first": "other.js", "second": "other.js", "third": "another.js"},
        exports={"Shape", "text"},
        declared=words("first second third Shape a renamed rest text x y z i j error"),
        used=words(
            """Base first second Shape a renamed rest depth third inner text x y z i j missing error
            console"""
        ),
        most_declared=2,
    )
    assert read(READ) == expected
