"""Settings of a new training run, from scratch or from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from attnlm.base.errors import UsageError
from attnlm.base.own_code import OwnCode, is_code_name, named_code, passed_code
from attnlm.base.setting_fields import Setting, Settings
from attnlm.config.recipes import Recipe, load_sizes
from attnlm.config.settings import CHOSEN_BY_NAME, Config, ParentRun, resolve
from attnlm.model.own_arguments import PREFIX, with_defaults


class SizeCandidates(NamedTuple):
    """The model sizes of a recipe, from which a run chooses one that suits its budget."""

    sizes: Sequence[Settings]
    """the recipe's settings with each size, in ascending order"""
    settings: Mapping[str, Setting]
    """the settings that override the recipe in every size"""
    budget: float
    """in seconds"""


class Request(NamedTuple):
    """The configuration requested for a new run."""

    config: Config
    """made with the first of the sizes, if there are several"""
    candidates: SizeCandidates | None = None


def resolve_new(
    settings: Mapping[str, Setting], recipe: Recipe | None, parent: ParentRun | None = None
) -> Request:
    """Resolve the configuration of a new run. Raises as `load_sizes` and `resolve` do."""
    settings = with_own_code(settings)
    sizes: list[Settings] = [{}] if recipe is None else load_sizes(recipe)
    candidates = None
    if len(sizes) > 1:
        candidates = _size_candidates(f"the recipe {recipe}", sizes, dict(settings), parent)
    config = resolve(settings, sizes[0], parent)
    config = replace(config, spec=with_defaults(config.spec, settings))
    return Request(config, candidates)


def with_own_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which own code, named or passed as a class or function, is an OwnCode.

    The arguments in `set`, a dictionary, become settings. Raises UsageError and AttnlmError as
    `named_code` and `passed_code` do.
    """
    with_code = dict(settings)
    for name, value in settings.items():
        if name in CHOSEN_BY_NAME and is_code_name(value) and not isinstance(value, OwnCode):
            with_code[name] = named_code(value)
        elif name in CHOSEN_BY_NAME and callable(value):
            with_code[name] = passed_code(value)
    arguments = with_code.pop("set", None) or {}
    if not isinstance(arguments, Mapping):
        raise UsageError("`set` must be a dictionary", "write set={'name': value}")
    return with_code | {PREFIX + str(name): value for name, value in arguments.items()}


def _size_candidates(
    recipe: str, sizes: Sequence[Settings], settings: Settings, parent: object
) -> SizeCandidates:
    chosen: dict[str, object] = {**settings, "start_from": parent}
    for name in ("start_from", "model", "processes"):
        if chosen.get(name, 1) not in (sizes[0].get(name), None, 1):
            raise UsageError(
                f"{recipe} chooses a model size, and cannot be combined with this `{name}`",
                f"leave out `{name}` or the recipe",
            )
    has_steps = "steps" in settings
    budgets = [] if has_steps else [resolve(settings, size).training.budget for size in sizes]
    if not budgets or budgets[0] is None:
        hint = "use `budget`" + (" instead of `steps`" if has_steps else "")
        raise UsageError(f"{recipe} needs a budget, for which it chooses a model size", hint)
    return SizeCandidates(sizes, settings, budgets[0])
