"""The order of the rooms: each uses only rooms before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attnlm

SOURCE = Path(attnlm.__file__).parent
ROOMS = (
    *("base", "compute", "text", "tokens", "model", "config", "data", "runs"),
    *("training", "generation", "see", "workflows", "cli"),
)
LONGEST = 600
# Hints name commands, and a report says how its run is made again.
KNOW_FLAGS = ("base/folders.py", "base/suggestions.py", "see/reproduce.py")
FLAG = re.compile(r"(?<![\w(])--[a-z]")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def test_every_folder_is_a_room() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders == set(ROOMS)


def test_imports_point_one_way() -> None:
    upwards = []
    for path in modules():
        own = path.relative_to(SOURCE).parts[0]
        if own not in ROOMS:
            continue
        for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            room = room_of(module) if module.startswith("attnlm.") else ""
            if room and ROOMS.index(room) > ROOMS.index(own):
                upwards.append(f"{path.relative_to(SOURCE)} uses {module}")
    assert upwards == []


def test_nothing_below_the_command_line_prints_or_names_a_flag() -> None:
    found = []
    for path in modules():
        name = str(path.relative_to(SOURCE))
        if name.startswith(("cli/", "__main__")) or name in KNOW_FLAGS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "print":
                found.append(f"{name}:{node.lineno} prints")
            if not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            if isinstance(node.value, str) and FLAG.search(node.value):
                found.append(f"{name}:{node.lineno} names a flag: {node.value!r}")
    assert found == []


def test_only_documented_names_of_typer_and_tqdm_are_used() -> None:
    """Users get the newest versions, in which inner classes may have changed."""
    documented = {
        *("typer", "typer.core.TyperCommand", "typer.core.TyperGroup", "tqdm.tqdm"),
        "typer.completion",  # its functions have no other name; only completion needs them
    }
    used = {
        f"{module} in {path.name}"
        for path in modules()
        for module in imported(ast.parse(path.read_text(encoding="utf-8")))
        if module.split(".")[0] in ("typer", "click", "tqdm") and module not in documented
    }
    assert used == set()


def test_no_module_is_long() -> None:
    lengths = {p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in modules()}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
