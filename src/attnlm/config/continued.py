"""Settings of a training that starts from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import Setting, fields_of, quoted
from attnlm.config.settings import Config, resolve
from attnlm.model.architecture import Architecture

_FREE = ("dropout",)  # no weight depends on it


def resolve_from(
    weights: Architecture,
    whose: str,
    settings: Mapping[str, Setting],
    recipe: Mapping[str, Setting] | None = None,
) -> Config:
    """Settings over recipe over defaults, for a model that has the weights of the run `whose`.

    Raises as `resolve` does, and for what would change the model.
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
                    f"{origin}`{name}` can't be changed, since the weights are those of {whose}",
                    f"its `{name}` is {has}: leave `{name}` out, or train from scratch",
                )
    taken = {name: value for name, value in fixed.items() if name not in recipe.keys() & _FREE}
    return resolve({**taken, **settings}, recipe)
