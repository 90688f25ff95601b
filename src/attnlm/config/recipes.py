"""Recipes: settings by name, from the package, a TOML file, or a run's config.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import Setting, Settings
from attnlm.base.suggestions import suggestion

_LARGEST_RECIPE = 2**20  # bytes
# For tomllib, whose time grows with the square of the parts of a dotted key: some seconds.
_LARGEST_TOML = 2**14


_ABOUT, _SIZES = "about", "sizes"


@dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """A recipe of the package in a list. What was not measured is None."""

    name: str
    purpose: str
    model: str
    tokenizer: str | None
    """What the text is to be encoded with; None for any."""
    steps: int | None
    """None where a budget decides."""
    val_loss: float | None
    """The median of several seeds, in nats per token of Tiny Shakespeare's validation split."""
    val_loss_range: tuple[float, float] | None
    """The lowest and the highest of these seeds."""
    seconds_range: tuple[float, float] | None
    """Of training, on two cores of a server CPU: the shortest and the longest that was measured."""


def list_recipes() -> list[RecipeEntry]:
    """The recipes that come with the package, by name.

        purposes = {entry.name: entry.purpose for entry in attnlm.list_recipes()}

    Their figures are those of docs/references.md.
    """
    entries = []
    for name in recipe_names():
        recipe = tomllib.loads(_of_package(name))
        about = recipe.pop(_ABOUT)
        ranges = {
            key: tuple(about[key]) if key in about else None
            for key in ("val_loss_range", "seconds_range")
        }
        entries.append(
            RecipeEntry(
                name=name,
                purpose=about["purpose"],
                model=recipe["model"],
                tokenizer=recipe.get("tokenizer"),
                steps=recipe.get("steps"),
                val_loss=about.get("val_loss"),
                **ranges,
            )
        )
    return entries


def load_recipe(name: str) -> Settings:
    """The settings of a recipe: one of the package's by name, a TOML file, or a run's config.json.

    A table `[about]` of a TOML file is for readers, and left out.
    Raises AttnlmError when there is none, or when it is neither TOML nor a run's configuration;
    UsageError for a recipe of several sizes. Its settings are checked when they are resolved.
    """
    settings, *larger = load_sizes(name)
    if larger:
        raise UsageError(
            f"the recipe {name} has {1 + len(larger)} sizes, and chooses one when it trains",
            "train with it first; the run's config.json is then a recipe of one size",
        )
    return settings


def load_sizes(name: str) -> list[Settings]:
    """The settings of a recipe in each of its `[[sizes]]`, in their order, or once without them.

    Raises AttnlmError as `load_recipe` does.
    """
    recipe = _loaded(name)
    sizes = recipe.pop(_SIZES, [{}])
    if not (isinstance(sizes, list) and sizes and all(isinstance(size, dict) for size in sizes)):
        raise AttnlmError(f"in the recipe: {_SIZES} must be tables", f"write [[{_SIZES}]] for each")
    return [{**recipe, **size} for size in sizes]


def _loaded(name: str) -> dict[str, Any]:
    path = Path(name)
    try:
        if name in recipe_names():
            return _settings(tomllib.loads(_of_package(name)))
        with path.open("rb") as file:  # perhaps a pipe
            content = file.read(_LARGEST_RECIPE + 1)
        if len(content) > _LARGEST_RECIPE:
            raise ValueError("it is too large")
        text = content.decode("utf-8-sig")
        if path.suffix == ".json":
            loaded = json.loads(text)
        elif len(content) > _LARGEST_TOML:
            raise ValueError(f"it has {len(content):,} bytes, more than {_LARGEST_TOML:,}")
        else:
            loaded = tomllib.loads(text)
    except FileNotFoundError:
        hint = suggestion(name, recipe_names(), f"recipes: {', '.join(recipe_names())}")
        raise AttnlmError(f"no recipe or file is called {name!r}", hint) from None
    except OSError as error:
        raise AttnlmError(
            f"can't read the recipe {name!r}: {error.strerror}",
            f"give a TOML file, or one of {', '.join(recipe_names())}",
        ) from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise AttnlmError(
            f"the recipe {name} can't be parsed: {reason}",
            "a recipe is a TOML file of `key = value` lines, or a run's config.json",
        ) from None
    if path.suffix == ".json":
        loaded = loaded.get("config") if isinstance(loaded, dict) else None
    if not isinstance(loaded, dict):
        raise AttnlmError(f"{name} is not a run's config.json", "give the file from a run's folder")
    return _settings(loaded)


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """Without the table about it; a setting of that name would be an error as any unknown one."""
    is_table = isinstance(recipe.get(_ABOUT), dict)
    return {name: value for name, value in recipe.items() if not (is_table and name == _ABOUT)}


def _of_package(name: str) -> str:
    return (resources.files("attnlm") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("attnlm") / "recipes"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml"))


def to_toml(settings: Mapping[str, Setting]) -> str:
    """A flat table as TOML, so that what `--print-config` shows is a recipe."""
    # JSON writes strings, numbers and booleans as TOML does.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
