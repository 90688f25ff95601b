"""Recipes: settings by name, from the package, a TOML file, or a run's config.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.base.files import read_text
from attnlm.base.setting_fields import Setting, Settings
from attnlm.base.suggestions import our_name, suggestion


@dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """An entry of `list_recipes`: a recipe of the package. None stands for values not measured."""

    name: str
    purpose: str
    model: str
    tokenizer: str | None
    """The tokenizer that the recipe was made for; None for any."""
    steps: int | None
    """The number of steps, or None if a budget determines it."""
    val_loss: float | None = None
    """The median validation loss of several seeds, in nats per token of Tiny Shakespeare."""
    val_loss_range: tuple[float, float] | None = None
    """The lowest and the highest loss of the seeds whose median is `val_loss`."""
    seconds_range: tuple[float, float] | None = None
    """The shortest and the longest measured training time, on two cores of a server CPU."""


def list_recipes() -> list[RecipeEntry]:
    """Return the recipes that come with the package, sorted by name.

        purposes = {entry.name: entry.purpose for entry in attnlm.list_recipes()}

    docs/train.md has the same losses and times.
    """
    entries = []
    for name in recipe_names():
        recipe = tomllib.loads(_packaged_text(name))
        entry: dict[str, Any] = {key: recipe.get(key) for key in ("model", "tokenizer", "steps")}
        for key, value in recipe["about"].items():
            entry[key] = tuple(value) if isinstance(value, list) else value
        entries.append(RecipeEntry(name=name, **entry))
    return entries


Recipe = str | Path | Mapping[str, Setting]
"""The name of a recipe of the package, the path of a TOML file or config.json, or settings."""


def load_sizes(recipe: Recipe) -> list[Settings]:
    """Return a recipe's settings for each of its `[[sizes]]`; one item if it has no sizes.

    The table `[about]` of a TOML file is for readers and left out, and our names replace those of
    other tools, such as n_layer. `resolve` checks the settings; this function does not. Raises
    AttnlmError for a file that does not exist or has another format.
    """
    if isinstance(recipe, Mapping):
        return [{our_name(key): value for key, value in recipe.items()}]
    content = _read_recipe(str(recipe))
    if isinstance(content.get("about"), dict):  # `resolve` refuses anything but a table
        del content["about"]
    sizes = content.pop("sizes", [{}])
    if not (isinstance(sizes, list) and sizes and all(isinstance(size, dict) for size in sizes)):
        raise AttnlmError("in the recipe: sizes must be tables", "start each with [[sizes]]")
    return [{our_name(key): value for key, value in (content | size).items()} for size in sizes]


def _read_recipe(name: str) -> dict[str, Any]:
    names = recipe_names()
    if name in names:
        return tomllib.loads(_packaged_text(name))
    path = Path(name)
    is_json = path.suffix == ".json"
    try:
        loaded = (json if is_json else tomllib).loads(read_text(path))
    except OSError as error:
        hint = suggestion(name, names, f"use a TOML file, or one of {', '.join(names)}")
        raise AttnlmError(f"cannot read the recipe {name!r}: {error.strerror}", hint) from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0].partition("; use sys.")[0]
        raise AttnlmError(
            f"cannot parse the recipe {name}: {reason}",
            "a recipe is a TOML file of `key = value` lines, or a run's config.json",
        ) from None
    if is_json:
        loaded = loaded.get("config") if isinstance(loaded, dict) else None
    if not isinstance(loaded, dict):
        raise AttnlmError(
            f"{name} is not a run's config.json", "use the config.json in a run's folder"
        )
    if "steps" in loaded and is_json:
        loaded.pop("budget", None)  # a run with a budget recorded the steps that it made
    return loaded


def _packaged_text(name: str) -> str:
    return (resources.files("attnlm") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("attnlm") / "recipes"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml"))


def to_toml(settings: Mapping[str, Setting]) -> str:
    """Return a flat table as TOML, so that the output of `--print-config` is a recipe."""
    # JSON writes strings, numbers and booleans as TOML does.
    keys = {name: name if name.isidentifier() else json.dumps(name) for name in settings}
    return "".join(f"{keys[name]} = {json.dumps(value)}\n" for name, value in settings.items())
