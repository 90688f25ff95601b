"""Settings of a new training run, from scratch or from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.settings import Setting, Settings
from attnlm.config.recipes import load_sizes
from attnlm.config.settings import Config, ParentRun, resolve


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
    parent: ParentRun | None = None,
) -> Resolved:
    """Resolve the configuration of a new run. A recipe of type Resolved is returned unchanged.

    Raises as `load_recipe` and `resolve` do.
    """
    if isinstance(recipe, Resolved):
        return recipe
    sizes: list[Settings] = [{}] if recipe is None else load_sizes(str(recipe))
    if len(sizes) > 1:
        _check_several(f"the recipe {recipe}", sizes, dict(settings), parent)
    config = resolve(settings, sizes[0], parent)
    if parent is None and config.training.lora is not None:
        raise UsageError(
            "`lora` needs a run to adapt",
            "name the run with `start_from`, or leave `lora` out",
        )
    return Resolved(config, sizes, settings)


def _check_several(
    recipe: str, sizes: Sequence[Settings], settings: Settings, parent: object
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
