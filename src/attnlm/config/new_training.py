"""Settings of a new training run, from scratch or from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import Setting, Settings, fields_of, quoted
from attnlm.config.recipes import load_sizes
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
    if len(sizes) > 1:
        _check_several(f"the recipe {recipe}", sizes, settings, parent)
    config = resolve_from(parent, settings, sizes[0])
    if parent is None and config.training.lora is not None:
        raise UsageError(
            "`lora` needs a run to adapt",
            "name the run with `start_from`, or leave `lora` out",
        )
    return Resolved(config, sizes, settings)


def _check_several(
    recipe: str, sizes: Sequence[Settings], settings: Mapping[str, Setting], parent: object
) -> None:
    given: dict[str, object] = {**settings, "start_from": parent}
    for name in ("start_from", "model", "processes"):
        if given.get(name, 1) not in (sizes[0].get(name), None, 1):
            raise UsageError(
                f"{recipe} chooses a model size, and cannot be combined with this `{name}`",
                f"leave out `{name}` or the recipe",
            )
    if "steps" in given or "budget" not in {**sizes[0], **given}:
        hint = "use `budget`" + (" instead of `steps`" if "steps" in given else "")
        raise UsageError(f"{recipe} needs a budget, for which it chooses a model size", hint)
    for number, size in enumerate(sizes, 1):
        try:
            resolve(settings, size)
        except AttnlmError as error:
            message = f"{error.message} (in size {number} of the recipe)"
            raise type(error)(message, error.hint) from None


def resolve_from(
    parent: tuple[Architecture, str] | None,
    settings: Mapping[str, Setting],
    recipe: Mapping[str, Setting],
) -> Config:
    """Return the configuration of a new run, which starts from the weights of `parent` if given.

    `parent` is another run's architecture, of which only `dropout` may be changed, and its name.
    Raises the errors of `resolve`, UsageError if `settings` change the model, and AttnlmError if
    the recipe changes the model.
    """
    if parent is None:
        return resolve(settings, recipe)
    fixed, whose = parent[0].settings(), parent[1]
    sources = (recipe, AttnlmError, "in the recipe: "), (settings, UsageError, "")
    for given, error, origin in sources:
        for name in given.keys() & fields_of(Architecture).keys() - set(_FREE):
            if given[name] != fixed.get(name):
                has = quoted(fixed[name]) if name in fixed else "none"
                raise error(
                    f"{origin}`{name}` cannot be changed: the weights come from {whose}",
                    f"its `{name}` is {has}: leave `{name}` out, or train from scratch",
                )
    taken = {name: value for name, value in fixed.items() if name not in recipe.keys() & _FREE}
    return resolve({**taken, **settings}, recipe)
