"""Settings of a new training run, from scratch or from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import Setting, Settings, fields_of, quoted
from attnlm.config.recipes import load_recipe, load_sizes
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import Architecture

_FREE = ("dropout",)  # no weight depends on it


class Resolved(NamedTuple):
    """A configuration, and the recipe and settings from which `resolve_new` made it."""

    config: Config
    """The configuration made with the first item of `sizes`."""
    sizes: Sequence[Settings] = ({},)
    """The recipe's settings for each of its model sizes, from which a run with a budget chooses."""
    settings: Mapping[str, Setting] = {}
    began: float | None = None
    """The `time.perf_counter` at which the budget begins. If this is None, the budget begins with
    the command, or with the call of `train`."""


def resolve_new(
    settings: Mapping[str, Setting],
    recipe: str | Path | Resolved | None,
    parent: tuple[Architecture, str] | None = None,
) -> Resolved:
    """Resolve the configuration of a new run. A recipe of type Resolved is returned unchanged.

    `parent` is the architecture and name of the run whose weights the new run starts from. Raises
    as `load_recipe`, `resolve` and `resolve_from` do.
    """
    if isinstance(recipe, Resolved):
        return recipe
    sizes: list[Settings] = [{}] if recipe is None else load_sizes(str(recipe))
    if parent is not None:
        if len(sizes) > 1:
            raise UsageError(
                f"`start_from` cannot be combined with the recipe {recipe}, which chooses a size",
                "leave one of them out",
            )
        return Resolved(resolve_from(*parent, settings, sizes[0]), sizes, settings)
    if len(sizes) > 1:
        _check_several(f"the recipe {recipe}", sizes, settings)
    config = resolve(settings, sizes[0])
    if config.training.lora is not None:
        raise UsageError(
            "`lora` needs a run to adapt",
            "name the run with `start_from`, or leave `lora` out",
        )
    return Resolved(config, sizes, settings)


def resolve_planned(
    settings: Mapping[str, Setting],
    recipe: str | None,
    parent: tuple[Architecture, str] | None = None,
) -> Config:
    """Return the configuration that `plan` examines. `lora` is allowed even if `parent` is None."""
    known = None if recipe is None else load_recipe(recipe)
    return resolve(settings, known) if parent is None else resolve_from(*parent, settings, known)


def _check_several(recipe: str, sizes: Sequence[Settings], settings: Mapping[str, Setting]) -> None:
    if "steps" in settings or "budget" not in {**sizes[0], **settings}:
        hint = "use `budget`" + (" instead of `steps`" if "steps" in settings else "")
        raise UsageError(f"{recipe} needs a budget, for which it chooses a model size", hint)
    for name in ("model", "processes"):
        if settings.get(name, 1) not in (sizes[0].get(name, 1), 1):
            other = "another `model`" if name == "model" else "several `processes`"
            raise UsageError(
                f"{recipe} cannot be combined with {other}",
                f"leave out `{name}` or the recipe",
            )
    for number, size in enumerate(sizes, 1):
        try:
            resolve(settings, size)
        except AttnlmError as error:
            message = f"{error.message} (in size {number} of the recipe)"
            raise type(error)(message, error.hint) from None


def resolve_from(
    weights: Architecture,
    whose: str,
    settings: Mapping[str, Setting],
    recipe: Mapping[str, Setting] | None = None,
) -> Config:
    """Return the configuration of a new run that starts from the weights of another run.

    `whose` is the name of the other run, and `weights` is its architecture, of which only `dropout`
    may be changed. Raises the errors of `resolve`, UsageError if `settings` change the model, and
    AttnlmError if the recipe changes the model.
    """
    recipe, fixed = recipe or {}, weights.settings()
    for given, error, origin in (
        (recipe, AttnlmError, "in the recipe: "),
        (settings, UsageError, ""),
    ):
        for name in given.keys() & fields_of(Architecture).keys() - set(_FREE):
            if given[name] != fixed.get(name):
                has = quoted(fixed[name]) if name in fixed else "none"
                raise error(
                    f"{origin}`{name}` cannot be changed: the weights come from {whose}",
                    f"its `{name}` is {has}: leave `{name}` out, or train from scratch",
                )
    taken = {name: value for name, value in fixed.items() if name not in recipe.keys() & _FREE}
    return resolve({**taken, **settings}, recipe)
