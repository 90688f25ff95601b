"""The order of the subpackages: each uses only subpackages before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnlm

SOURCE = Path(attnlm.__file__).parent
SUBPACKAGES = (
    *("base", "compute", "text", "tokens", "model", "config", "data", "runs"),
    *("training", "generation", "see", "workflows", "cli"),
)


def imported(content: str) -> Iterator[str]:
    """The modules and names that a module uses, from where they come."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (home_of(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "attnlm":
            yield home_of(f"attnlm.{node.attr}")


def home_of(name: str) -> str:
    """Return where a name of the package's root comes from; other names are returned unchanged."""
    home = attnlm._HOMES.get(name.removeprefix("attnlm."))
    return name if home is None else f"attnlm.{home}.{name.removeprefix('attnlm.')}"


@pytest.fixture(scope="module")
def uses() -> dict[str, set[str]]:
    """What each module of the package imports."""
    return {
        str(path.relative_to(SOURCE)): set(imported(path.read_text(encoding="utf-8")))
        for path in SOURCE.rglob("*.py")
    }


def test_imports_point_one_way(uses: dict[str, set[str]]) -> None:
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(SUBPACKAGES)
    upwards = {
        f"{path} uses {module}"
        for path, modules in uses.items()
        for module in modules
        if module.startswith(tuple(f"attnlm.{later}." for later in after(path.split("/")[0])))
    }
    assert not upwards


def after(subpackage: str) -> tuple[str, ...]:
    """The subpackages that come later; none, for a module outside of all."""
    _, *later = SUBPACKAGES[SUBPACKAGES.index(subpackage) :] if subpackage in SUBPACKAGES else [""]
    return tuple(later)


def test_imports_of_the_packages_root_are_seen() -> None:
    found = {"attnlm", "attnlm.see.heads.heads", "attnlm.see.attend.attend", "attnlm.__version__"}
    content = "import attnlm\nfrom attnlm import heads\nattnlm.attend(attnlm.__version__)"
    assert set(imported(content)) == found


def test_only_documented_names_of_typer_and_tqdm_are_used(uses: dict[str, set[str]]) -> None:
    """Users get the newest versions, in which inner classes may have changed."""
    documented = {
        *("typer", "typer.core.TyperCommand", "typer.core.TyperGroup", "tqdm.tqdm"),
        "typer.completion",  # its functions have no other name; only completion needs them
    }
    used = {
        module
        for modules in uses.values()
        for module in modules
        if module.split(".")[0] in ("typer", "click", "tqdm")
    }
    assert used <= documented
