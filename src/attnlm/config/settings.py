"""The configuration of a run: settings of its model and training, with defaults and checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.own_code import OwnCode, is_code_name, named_code, passed_code
from attnlm.base.setting_fields import (
    Setting,
    Settings,
    check_value,
    fields_of,
    quoted,
    settings_of,
)
from attnlm.base.suggestions import suggestion
from attnlm.config.recipes import Recipe, load_sizes
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import PRESETS, Architecture, architecture
from attnlm.model.own_arguments import (
    CODE,
    PREFIX,
    check_argument,
    resolved_arguments,
    with_defaults,
)
from attnlm.model.own_specs import own_model
from attnlm.model.spec import ModelSpec


class ParentRun(Protocol):
    """The run whose weights a new run starts from."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Config: ...


@dataclass(frozen=True)
class Config:
    """The settings of a run's model and training, with all defaults filled in."""

    spec: ModelSpec
    training: TrainingConfig

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens per step, summed over all processes."""
        return self.training.batch_size * self.spec.block_size

    @property
    def codes(self) -> list[OwnCode]:
        """Return the own code that the run needs."""
        return [value for value in self.settings().values() if isinstance(value, OwnCode)]

    def arguments_of(self, code: OwnCode) -> Settings:
        """Return the arguments that own code is called with beside sizes; a loss has none."""
        if code == self.training.loss:
            return {}
        return resolved_arguments(self.spec.codes, self.spec.arguments)

    def settings(self) -> Settings:
        """Return the settings of model and training in one dictionary, which is a valid recipe."""
        training = {k: v for k, v in asdict(self.training).items() if v is not None}
        settings = {**self.spec.settings(), **training}
        hashes = {v.file: v.sha256 for v in settings.values() if isinstance(v, OwnCode)}
        if hashes:
            settings[CODE] = " ".join(f"{name}:{sha256}" for name, sha256 in hashes.items())
        return settings

    def with_training(self, **changed: Any) -> Config:
        """Return the configuration with some training settings changed, without checking them."""
        return replace(self, training=replace(self.training, **changed))


RECORD_OF = settings_of(Architecture, TrainingConfig)
"""The record of each setting. The model's settings come first."""
CHOSEN_BY_NAME = ("model", "attention", "mlp", "scores", "loss")
"""Settings that may name own code."""

# Default training settings of each model, measured on Tiny Shakespeare's characters and tuned on
# the last tenth of its training split. A model without an entry takes _ONE_LAYER, or
# _DEEP if it has residual connections.
_ONE_LAYER: Settings = {"steps": 1000}
_DEEP: Settings = {"batch_size": 16, "steps": 800, "beta2": 0.99}
_TRAINING_DEFAULTS: dict[str, Settings] = {
    "bigram": {"learning_rate": 0.1, "steps": 1000},
    "average": {"steps": 2000},
    "dot-product": {"steps": 2000},
}
# Muon is the default if it has matrices to update. Then each optimizer has its own learning rate.
# A model without an entry has the rates of multi-head or transformer.
_LEARNING_RATES: dict[str, dict[str, float]] = {
    "single-head": {"muon": 0.03, "adamw": 0.02},
    "multi-head": {"muon": 0.03, "adamw": 0.03},
    "wide-head": {"muon": 0.03, "adamw": 0.02},
    "transformer": {"muon": 0.02, "adamw": 0.005},
    "gpt2": {"muon": 0.02, "adamw": 0.002},
    "llama": {"muon": 0.02, "adamw": 0.005},
    "qwen3": {"muon": 0.02, "adamw": 0.003},
}


class Request(NamedTuple):
    """What is requested of a new run."""

    config: Config
    """made with the first of the `sizes`"""
    settings: Settings
    """the settings that override the recipe"""
    sizes: Sequence[Settings]
    """the recipe's settings; if it has several sizes, with each size in ascending order, from which
    a run chooses one that suits its budget"""

    def ignored(self, config: Config) -> list[str]:
        """Return the recipe's settings of a model that the one of `config` does not use."""
        used = {*config.spec.settings(), *self.settings, "scores"}
        parts = (name for name in self.sizes[0] if RECORD_OF.get(name) is Architecture)
        return [name for name in parts if name not in used]


def resolve_new(
    settings: Mapping[str, Any], recipe: Recipe | None, parent: ParentRun | None = None
) -> Request:
    """Resolve the configuration of a new run. Raises as `load_sizes` and `resolve` do."""
    given = with_own_code(settings)
    sizes = [{}] if recipe is None else load_sizes(recipe)
    if len(sizes) > 1:
        chosen = {**given, "start_from": parent}
        for name in ("start_from", "model", "processes"):
            if chosen.get(name, 1) not in (sizes[0].get(name), None, 1):
                raise UsageError(
                    f"the recipe {recipe} chooses a model size, and cannot be combined with this "
                    f"`{name}`",
                    f"leave out `{name}` or the recipe",
                )
        if "steps" in given or resolve(given, sizes[0]).training.budget is None:
            instead = " instead of `steps`" if "steps" in given else ""
            raise UsageError(
                f"the recipe {recipe} needs a budget, for which it chooses a model size",
                f"use `budget`{instead}",
            )
    config = resolve(given, sizes[0], parent)
    config = replace(config, spec=with_defaults(config.spec, given))
    return Request(config, given, sizes)


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


def resolve(
    settings: Mapping[str, Setting],
    recipe: Mapping[str, Setting] | None = None,
    parent: ParentRun | None = None,
) -> Config:
    """Return the checked configuration. `settings` override the recipe, and both override defaults.

    Of the parent's architecture, only `dropout` can be changed. Raises UsageError if `settings` are
    wrong, AttnlmError if the recipe is wrong.
    """
    named = {name for name, value in settings.items() if isinstance(value, OwnCode)}
    recipe = {name: value for name, value in (recipe or {}).items() if name not in named}
    tokenizer: Any = recipe.pop("tokenizer", None)
    recipe.pop(CODE, None)
    if not isinstance(tokenizer, str | None):
        message = f"in the recipe: invalid value for `tokenizer`: {quoted(tokenizer)}"
        raise AttnlmError(message, "name one, such as char or bpe:512")
    try:
        return _resolve_checked(dict(settings), recipe, parent)
    except UsageError as error:
        try:
            _resolve_checked({}, recipe, parent)
        except UsageError:  # the recipe is at fault
            raise AttnlmError(f"in the recipe: {error.message}", error.hint) from None
        raise


def _resolve_checked(settings: Settings, recipe: Settings, parent: ParentRun | None) -> Config:
    recipe = _without_alternatives(recipe, settings)
    for name, value in (*recipe.items(), *settings.items()):
        check_setting(name, value)
    if "steps" in settings and "budget" in settings:
        raise UsageError("`steps` and `budget` cannot be combined", "use only one")
    if parent is not None:
        settings = {**_inherited(parent, {**recipe, **settings}), **settings}
    combined = {**recipe, **settings}
    check_files(code for code in combined.values() if isinstance(code, OwnCode))
    chosen = {k: v for k, v in combined.items() if RECORD_OF.get(k) is TrainingConfig}
    parts = {k: v for k, v in combined.items() if k not in chosen}
    model = _model(parts, settings)
    training = TrainingConfig(**(_training_defaults(model, chosen) | chosen))  # type: ignore[arg-type]
    _check_training(model, training)
    if training.budget is None and training.steps is not None:
        every = training.eval_every or max(1, math.ceil(training.steps / 10))
        training = replace(training, eval_every=every)
    return Config(model, training)


def _model(parts: Settings, settings: Settings) -> ModelSpec:
    """Return the model with these parts, of which some are the user's `settings`."""
    arguments = {k.removeprefix(PREFIX): v for k, v in parts.items() if k.startswith(PREFIX)}
    parts = {k: v for k, v in parts.items() if not k.startswith(PREFIX)}
    if arguments and not any(isinstance(value, OwnCode) for value in parts.values()):
        raise UsageError(
            f"{next(iter(arguments))!r} is set, but no code of your own takes arguments",
            "name the code, as in `attention` mine.py:MyHead",
        )
    if not isinstance(parts.get("scores"), OwnCode):
        parts.pop("scores", None)  # it has one other value, the default
    if isinstance(model := parts.get("model"), OwnCode):
        del parts["model"]
        return own_model(model, parts, arguments)
    return architecture(parts, settings, arguments)


def check_files(codes: Iterable[OwnCode]) -> None:
    """Raise UsageError if two files have the same name, under which a run keeps them."""
    hashes: dict[str, str] = {}
    for code in codes:
        if hashes.setdefault(code.file, code.sha256) != code.sha256:
            raise UsageError(f"two files are called {code.file}", "rename one")


def _without_alternatives(recipe: Settings, settings: Settings) -> Settings:
    """Return the recipe without the alternatives to `settings`, and with its budget in seconds."""
    left = dict(recipe)
    if isinstance(budget := left.get("budget"), str):
        left["budget"] = parse_seconds(budget)
    if "budget" in settings:
        left.pop("steps", None)
    if "steps" in settings:
        left.pop("budget", None)
    if settings.get("sampling") == "random":
        left.pop("stride", None)
    return left


def _inherited(parent: ParentRun, chosen: Settings) -> Settings:
    """Return the settings of the parent's architecture that `chosen` leaves as they are.

    Raises UsageError if `chosen` changes a setting that the weights depend on.
    """
    fixed = parent.config.spec.settings()
    names = {*fields_of(Architecture), *(key for key in chosen if key.startswith(PREFIX))}
    for key in chosen.keys() & names - {"dropout"}:
        value, old = chosen[key], fixed.get(key)
        if value != old or getattr(value, "sha256", "") != getattr(old, "sha256", ""):
            has = "none" if old is None else quoted(old)
            has = "another file of this name" if value == old else has
            raise UsageError(
                f"`{key}` cannot be changed: the weights come from {parent.name}",
                f"its `{key}` is {has}: leave `{key}` out, or train from scratch",
            )
    return {key: value for key, value in fixed.items() if key not in (*chosen, CODE)}


def _training_defaults(model: ModelSpec, chosen: Settings) -> Settings:
    """Return the defaults of the model's training that depend on the model or on `chosen`."""
    preset = model.preset
    is_deep = preset not in PRESETS or bool(PRESETS[preset].parts.get("residual"))
    defaults = dict(_TRAINING_DEFAULTS.get(preset, _DEEP if is_deep else _ONE_LAYER))
    if model.has_matrices:
        usual = _LEARNING_RATES["transformer" if is_deep else "multi-head"]
        optimizer = str(chosen.get("optimizer", "muon"))
        rate = _LEARNING_RATES.get(preset, usual)[optimizer]
        defaults |= {"optimizer": optimizer, "learning_rate": rate}
    if "budget" in chosen:
        del defaults["steps"]
    return defaults


def _check_training(model: ModelSpec, training: TrainingConfig) -> None:
    """Raise UsageError if training settings do not fit each other or the model."""
    processes, windows, steps = training.processes, training.batch_size, training.steps
    lowest, highest = training.min_learning_rate, training.learning_rate
    fewer = f" or {windows - windows % processes}" if windows > processes else ""
    problems = (
        (
            training.stride and training.sampling == "random",
            "`stride` cannot be combined with `sampling` random",
            "leave one out",
        ),
        (
            lowest and training.schedule == "constant",
            "`min_learning_rate` cannot be combined with `schedule` constant",
            "leave one out",
        ),
        (
            lowest > highest,
            f"`min_learning_rate` {lowest:g} is above `learning_rate` {highest:g}",
            f"use `min_learning_rate` {highest:g} or less",
        ),
        (
            windows % processes,
            f"`batch_size` {windows} is not divisible by `processes` {processes}",
            f"use `batch_size` {windows + -windows % processes}{fewer}",
        ),
        (
            training.optimizer == "muon" and not model.has_matrices,
            f"`optimizer` muon has no matrices to update inside {model.name}",
            "use `optimizer` adamw",
        ),
        (
            steps is not None and training.budget is None and training.warmup > steps,
            f"`warmup` {training.warmup} is longer than the run of {steps} steps",
            f"use `warmup` {steps} or less",
        ),
    )
    for is_problem, message, hint in problems:
        if is_problem:
            raise UsageError(message, hint)


def check_setting(name: str, value: Setting) -> None:
    """Check one setting by itself. Raises UsageError for an unknown name, wrong type or range, and
    for own code that is a text, as a file may have it."""
    if isinstance(value, OwnCode):
        return
    if name == "loss" or (name in CHOSEN_BY_NAME and is_code_name(value)):
        raise UsageError(
            f"`{name}` {quoted(value)} is not code that was named as an option or in Python",
            f"write `{name}` FILE.py:NAME on the command line; a file may not name code",
        )
    if name.startswith(PREFIX):
        check_argument(name.removeprefix(PREFIX), value)
        return
    if name not in RECORD_OF:
        hint = suggestion(name, RECORD_OF, f"the keys are {', '.join(RECORD_OF)}")
        raise UsageError(f"unknown key {quoted(name)}", hint)
    check_value(RECORD_OF[name], name, value)


_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_TIME = re.compile(
    rf"{_NUMBER}|(?:{_NUMBER}h(?:(?:ou)?rs?)?)?\s*(?:{_NUMBER}m(?:in(?:ute)?s?)?)?\s*"
    rf"(?:{_NUMBER}s(?:ec(?:ond)?s?)?)?",
    re.ASCII,
)


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as 90s, 5min, 1h30m or 90. Raises UsageError for others."""
    match = _TIME.fullmatch(text.strip().lower())
    parts = match.groups("0") if match else ()
    total = sum(float(n) * unit for n, unit in zip(parts, (1, 3600, 60, 1), strict=False))
    if not 0 < total < math.inf:
        raise UsageError(
            f"invalid value for `budget`: {quoted(text)}", "use a time such as 90s, 5m or 1h30m"
        )
    return total
