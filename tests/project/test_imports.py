"""The order of the subpackages: each uses only subpackages before it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import attnlm

SOURCE = Path(attnlm.__file__).parent
SUBPACKAGES = (
    *("base", "compute", "text", "tokens", "model", "config", "data", "runs"),
    *("training", "generation", "see", "workflows", "cli"),
)
LONGEST = 600
SCREEN = ("see/progress_bar.py", "see/loggers.py", "base/own_code.py", "model/own_arguments.py")
"""Modules that write to the screen, or redirect what tools and own code write."""
UPWARDS = {
    "runs/run.py uses attnlm.see.attend.Attention",
    "runs/run.py uses attnlm.see.attend.attend",
}
"""`Run.attention`, which notebooks call, loads a later subpackage when it is called."""


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from map(home_of, names)
        elif isinstance(node, ast.Attribute) and is_named(node.value, "attnlm"):
            yield home_of(f"attnlm.{node.attr}")


def is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def home_of(name: str) -> str:
    """Return where a name of the package's root comes from; other names are returned unchanged."""
    home = attnlm._HOMES.get(name.removeprefix("attnlm."))
    return name if home is None else f"attnlm.{home}.{name.removeprefix('attnlm.')}"


def subpackage_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in SUBPACKAGES else ""


def test_every_folder_is_a_subpackage() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders == set(SUBPACKAGES)


def test_imports_point_one_way() -> None:
    upwards = set()
    for path in modules():
        own = path.relative_to(SOURCE).parts[0]
        if own not in SUBPACKAGES:
            continue
        for module in imported(tree_of(path)):
            subpackage = subpackage_of(module) if module.startswith("attnlm.") else ""
            if subpackage and SUBPACKAGES.index(subpackage) > SUBPACKAGES.index(own):
                upwards.add(f"{path.relative_to(SOURCE)} uses {module}")
    assert upwards == UPWARDS


def test_imports_of_the_packages_root_are_seen() -> None:
    tree = ast.parse("import attnlm\nfrom attnlm import heads\nattnlm.attend(attnlm.__version__)")
    found = {"attnlm", "attnlm.see.heads.heads", "attnlm.see.attend.attend", "attnlm.__version__"}
    assert set(imported(tree)) == found


def test_only_these_modules_outside_cli_write_to_the_screen() -> None:
    names = {str(path.relative_to(SOURCE)): path for path in modules()}
    writing = {
        name
        for name, path in names.items()
        if not name.startswith(("cli/", "__main__"))
        for node in ast.walk(tree_of(path))
        if is_named(node, "print")
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("stdout", "stderr")
            and is_named(node.value, "sys")
        )
    }
    assert writing == set(SCREEN)


def test_only_documented_names_of_typer_and_tqdm_are_used() -> None:
    """Users get the newest versions, in which inner classes may have changed."""
    documented = {
        *("typer", "typer.core.TyperCommand", "typer.core.TyperGroup", "tqdm.tqdm"),
        "typer.completion",  # its functions have no other name; only completion needs them
    }
    used = {
        f"{module} in {path.name}"
        for path in modules()
        for module in imported(tree_of(path))
        if module.split(".")[0] in ("typer", "click", "tqdm") and module not in documented
    }
    assert used == set()


def test_no_module_is_long() -> None:
    lengths = {p.name: len(p.read_text(encoding="utf-8").splitlines()) for p in modules()}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
