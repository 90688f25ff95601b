"""What a run is made of: the settings of a model and of its training, recipes, and their checks.

Every setting is one field below; its one line of help is also the help of the flag of that name.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from attnlm.errors import AttnlmError, UsageError
from attnlm.suggestions import suggestion

Setting = bool | int | float | str
Settings = dict[str, Setting]

RUNGS = (
    "bigram",
    "average",
    "dot-product",
    "single-head",
    "multi-head",
    "wide-head",
    "transformer",
)


def _setting(
    help: str,
    *,
    default: Any = None,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    known = {words: limit for words, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"help": help, "choices": choices, "limits": known})


_LARGEST = 2**20
_LARGEST_ROTARY_TABLE = 2**24  # numbers
_WIDEST_HEADS = 2**24  # all of a layer's together: a matrix's bytes fit into 64 bits
_MOST_STEPS = 2**40
_LARGEST_RECIPE = 2**20  # bytes
# For tomllib, whose time grows with the square of the parts of a dotted key: some seconds.
_LARGEST_TOML = 2**14


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture. A setting that the rung does not have is None."""

    model: str = _setting("the rung of the ladder", default="multi-head", choices=RUNGS)
    embed_dim: int | None = _setting("width of the embeddings", at_least=1, at_most=_LARGEST)
    heads: int | None = _setting("attention heads per layer", at_least=1, at_most=_LARGEST)
    head_size: int | None = _setting(
        "width of one head; embed_dim / heads unless given", at_least=1, at_most=_LARGEST
    )
    layers: int | None = _setting("transformer blocks", at_least=1, at_most=4096)
    block_size: int = _setting(
        "context: how many tokens the model sees", default=64, at_least=1, at_most=_LARGEST
    )
    dropout: float | None = _setting(
        "probability of dropping an attention weight (transformer: a residual)",
        at_least=0,
        below=1,
    )
    projection: bool | None = _setting("a linear map after the heads are concatenated")
    qkv_bias: bool | None = _setting("biases in the query, key and value maps")
    tie_embeddings: bool | None = _setting("one matrix as token embedding and as LM head")

    @property
    def num_heads(self) -> int:
        """Heads per layer, 1 on a rung that has no such setting."""
        return self.heads or 1

    @property
    def head_dim(self) -> int:
        """Width of one head: given, or embed_dim / heads, or embed_dim where heads are wide."""
        width = self.embed_dim or 0
        if self.head_size is not None:
            return self.head_size
        return width if self.model == "wide-head" else width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the model is trained. None means: decided when the run starts, and then recorded."""

    sampling: str = _setting(
        "windows: a shuffled pass each epoch, or drawn at random",
        default="epoch",
        choices=("epoch", "random"),
    )
    stride: int | None = _setting(
        "tokens from one window's start to the next (epoch); block_size unless given",
        at_least=1,
        at_most=_MOST_STEPS,
    )
    steps: int | None = _setting("updates in all", at_least=1, at_most=_MOST_STEPS)
    budget: float | None = _setting(
        "seconds to train for, in place of steps", above=0, at_most=10**8
    )
    batch_size: int = _setting("windows per step", default=32, at_least=1, at_most=_LARGEST)
    learning_rate: float = _setting("highest learning rate", default=0.01, above=0, at_most=100)
    optimizer: str = _setting(
        "adamw, or muon for matrices inside the model and adamw for the rest",
        default="adamw",
        choices=("adamw", "muon"),
    )
    beta1: float = _setting(
        "decay of the mean gradient: AdamW's β1, Muon's momentum", default=0.9, at_least=0, below=1
    )
    beta2: float = _setting("AdamW: decay of the mean square", default=0.999, at_least=0, below=1)
    schedule: str = _setting(
        "learning rate after the warm-up: constant, or falling to 0 in a line or a cosine",
        default="linear",
        choices=("constant", "linear", "cosine"),
    )
    cooldown: float = _setting(
        "fraction of the steps in which the learning rate falls", default=1.0, above=0, at_most=1
    )
    warmup: int = _setting(
        "steps in which the learning rate rises", default=0, at_least=0, at_most=_MOST_STEPS
    )
    weight_decay: float = _setting(
        "decoupled weight decay, per unit of learning rate", default=0.0, at_least=0, at_most=1000
    )
    weight_decay_on: str = _setting(
        "which parameters decay", default="matrices", choices=("matrices", "all")
    )
    gradient_clip: float | None = _setting(
        "largest norm of the whole gradient", above=0, at_most=1e38
    )
    eval_every: int | None = _setting(
        "steps from one evaluation to the next; a tenth of the steps unless given",
        at_least=1,
        at_most=_MOST_STEPS,
    )
    patience: int | None = _setting(
        "stop after this many evaluations without a better one", at_least=1, at_most=_MOST_STEPS
    )
    seed: int | None = _setting(
        "of weights, batches and dropout; drawn unless given", at_least=0, at_most=2**63 - 1
    )
    device: str = _setting(
        "where to compute", default="auto", choices=("auto", "cpu", "cuda", "mps")
    )
    dtype: str = _setting(
        "precision of the products", default="auto", choices=("auto", "float32", "bfloat16")
    )
    compile: str = _setting(
        "on: torch.compile; parts: C for parts of a one-layer rung's step (auto: where it pays)",
        default="auto",
        choices=("auto", "parts", "on", "off"),
    )
    threads: int | None = _setting("CPU threads", at_least=1, at_most=1024)


@dataclass(frozen=True)
class Config:
    """A resolved configuration, the recipe's keys that its model does not use, and the tokenizer
    that the recipe states it was made for."""

    model: ModelConfig
    training: TrainingConfig
    dropped: tuple[str, ...] = ()
    recipe_tokenizer: str | None = None

    def settings(self) -> Settings:
        """All that is decided, as one flat table: what a recipe would have to say."""
        flat = {**asdict(self.model), **asdict(self.training)}
        return {name: value for name, value in flat.items() if value is not None}


_FIELDS = {f.name: f for part in (ModelConfig, TrainingConfig) for f in fields(part)}
_TYPES = {**get_type_hints(ModelConfig), **get_type_hints(TrainingConfig)}
_MODEL_FIELDS = {f.name for f in fields(ModelConfig)}

# Which settings each rung has beside `model` and `block_size`.
_RUNG_SETTINGS: dict[str, tuple[str, ...]] = {
    "bigram": (),
    "average": ("embed_dim",),
    "dot-product": ("embed_dim",),
    "single-head": ("embed_dim", "head_size", "dropout"),
    "multi-head": ("embed_dim", "heads", "head_size", "dropout", "projection", "qkv_bias"),
    "wide-head": ("embed_dim", "heads", "dropout"),
    "transformer": ("embed_dim", "layers", "heads", "head_size", "dropout", "tie_embeddings"),
}

# Measured on Tiny Shakespeare's characters, tuned on the last tenth of its training split.
_DEFAULTS: Settings = {
    "embed_dim": 64,
    "heads": 4,
    "dropout": 0.0,
    "projection": False,
    "qkv_bias": False,
    "tie_embeddings": False,
    "steps": 2000,
}

_WITH_MATRICES: Settings = {"optimizer": "muon", "learning_rate": 0.03, "steps": 1000}

_RUNG_DEFAULTS: dict[str, Settings] = {
    "bigram": {"learning_rate": 0.1, "steps": 1000},
    "single-head": _WITH_MATRICES,
    "multi-head": _WITH_MATRICES,
    "wide-head": _WITH_MATRICES,
    "transformer": {
        "embed_dim": 128,
        "layers": 2,
        "block_size": 128,
        "batch_size": 16,
        "steps": 800,
        "optimizer": "muon",
        "learning_rate": 0.02,
        "beta2": 0.99,
    },
}


def setting_names() -> list[str]:
    """All settings, those of the model first."""
    return list(_FIELDS)


def help_of(name: str) -> str:
    """The line that explains a setting, for `--help` and for documents."""
    described = _FIELDS[name]
    choices = described.metadata["choices"]
    return (
        f"{described.metadata['help']}: {'|'.join(choices)}"
        if choices
        else str(described.metadata["help"])
    )


def described_settings() -> str:
    """All settings with type, limits and help, for the docstring of `train`."""
    lines = []
    for name, described in _FIELDS.items():
        limits = [f"{words} {limit}" for words, limit in described.metadata["limits"].items()]
        lines += [f"{name} : {', '.join([_kind(name).__name__, *limits])}", f"    {help_of(name)}"]
    return "\n".join(lines)


def flag(name: str) -> str:
    """A setting as it is typed: `embed_dim` → `--embed-dim`."""
    return "--" + name.replace("_", "-")


def resolve(settings: Mapping[str, Setting], recipe: Mapping[str, Setting] | None = None) -> Config:
    """Settings over recipe over defaults, checked.

    Raises UsageError when the settings given are at fault, AttnlmError when the recipe is.
    """
    recipe = dict(recipe or {})
    tokenizer = _stated_tokenizer(recipe.pop("tokenizer", None))
    try:
        return replace(_merge(settings, recipe), recipe_tokenizer=tokenizer)
    except UsageError as error:
        if recipe and _is_at_fault(recipe):
            raise AttnlmError(f"in the recipe: {error.message}", error.hint) from None
        raise


def _stated_tokenizer(stated: object) -> str | None:
    """What a recipe says in place of a setting: `--tokenizer` of the data that it was made for."""
    if stated is None or (isinstance(stated, str) and re.fullmatch(r"[a-z0-9_:]{1,20}", stated)):
        return stated
    raise AttnlmError("in the recipe: tokenizer names none", "it must be a text such as gpt2")


def _is_at_fault(recipe: Mapping[str, Setting]) -> bool:
    try:
        _merge({}, recipe)
    except UsageError:
        return True
    return False


def _merge(settings: Mapping[str, Setting], recipe: Mapping[str, Setting]) -> Config:
    for given in (settings, recipe):
        for name, value in given.items():
            check_setting(name, value)
    recipe, dropped = _without_unused(dict(recipe), settings)
    given = {**recipe, **settings}
    rung = str(given.get("model", _FIELDS["model"].default))
    _check_applies(rung, given)
    defaults = _rung_defaults(rung)
    if "budget" in given:
        _check_not_both(given, "steps", "budget")
        defaults.pop("steps", None)
    merged = {**defaults, **given}
    model = ModelConfig(**{k: v for k, v in merged.items() if k in _MODEL_FIELDS})  # type: ignore[arg-type]
    _check_shape(model)
    training = TrainingConfig(
        **{k: v for k, v in merged.items() if k not in _MODEL_FIELDS}  # type: ignore[arg-type]
    )
    _check_training(model, training, given)
    return Config(model, with_steps(training, training.steps), dropped)


def with_steps(training: TrainingConfig, steps: int | None) -> TrainingConfig:
    """The same training for `steps` updates, and what follows from them."""
    if steps is None:
        return training
    eval_every = training.eval_every or max(1, math.ceil(steps / 10))
    return replace(training, steps=steps, budget=None, eval_every=eval_every)


def _without_unused(
    recipe: Settings, settings: Mapping[str, Setting]
) -> tuple[Settings, tuple[str, ...]]:
    """Takes out of a recipe what the settings beside it replace or have no use for."""
    if "budget" in settings:
        recipe.pop("steps", None)
    if "steps" in settings:
        recipe.pop("budget", None)
    if settings.get("sampling") == "random":
        recipe.pop("stride", None)
    if "model" not in settings:
        return recipe, ()
    usable = _rung_fields(str(settings["model"]))
    dropped = tuple(name for name in recipe if name in _MODEL_FIELDS and name not in usable)
    return {name: value for name, value in recipe.items() if name not in dropped}, dropped


def _rung_fields(rung: str) -> set[str]:
    return {"model", "block_size", *_RUNG_SETTINGS[rung]}


def _rung_defaults(rung: str) -> Settings:
    usable = _rung_fields(rung)
    general = {k: v for k, v in _DEFAULTS.items() if k in usable or k not in _MODEL_FIELDS}
    return {**general, **_RUNG_DEFAULTS.get(rung, {})}


def _check_applies(rung: str, given: Iterable[str]) -> None:
    for name in given:
        if name in _MODEL_FIELDS and name not in _rung_fields(rung):
            users = [r for r in RUNGS if name in _RUNG_SETTINGS[r]]
            raise UsageError(
                f"{flag(name)} does not apply to {rung}",
                f"it applies to {', '.join(users)} (--model)",
            )


def _check_not_both(given: Iterable[str], one: str, other: str) -> None:
    if one in given and other in given:
        raise UsageError(f"{flag(one)} and {flag(other)} exclude each other", "give one of them")


def _check_shape(model: ModelConfig) -> None:
    """Refuses sizes that do not fit each other."""
    if model.embed_dim is None:
        return
    if model.head_size is None and model.model != "wide-head" and model.embed_dim % model.num_heads:
        width = model.num_heads * (2 if model.model == "transformer" else 1)  # of the narrowest
        raise UsageError(
            f"--embed-dim {model.embed_dim} can't be divided into --heads {model.heads}",
            f"give --embed-dim {width * max(1, model.embed_dim // width)}, or a --head-size",
        )
    if model.num_heads * model.head_dim > _WIDEST_HEADS:
        raise UsageError(
            f"--heads {model.num_heads} of {model.head_dim} are too wide together",
            f"give --heads {_WIDEST_HEADS // model.head_dim} or fewer",
        )
    if model.model == "transformer" and model.head_dim % 2:
        raise UsageError(
            f"rotary positions turn pairs of numbers, and a head of {model.head_dim} is odd",
            f"give --head-size {model.head_dim + 1}",
        )
    if model.model == "transformer" and model.block_size * model.head_dim > _LARGEST_ROTARY_TABLE:
        raise UsageError(
            f"a table of rotary positions for --block-size {model.block_size} and heads of "
            f"{model.head_dim} is too large",
            f"give --block-size {max(1, _LARGEST_ROTARY_TABLE // model.head_dim)} or less",
        )


def _check_training(
    model: ModelConfig, training: TrainingConfig, given: Mapping[str, Setting]
) -> None:
    if "stride" in given and training.sampling == "random":
        raise UsageError("--stride does not apply to --sampling random", "leave one of them out")
    if training.optimizer == "muon" and model.model in ("bigram", "average", "dot-product"):
        raise UsageError(
            f"--optimizer muon has no matrices to update inside {model.model}",
            "give --optimizer adamw",
        )
    if training.steps is not None and training.warmup > training.steps:
        raise UsageError(
            f"--warmup {training.warmup} is longer than the run of {training.steps} steps",
            "give fewer steps of warm-up",
        )


def check_setting(name: str, value: Setting) -> None:
    """One setting by itself. Raises UsageError for an unknown name, a wrong type or range."""
    if name not in _FIELDS:
        hint = suggestion(name, _FIELDS, f"the keys are {', '.join(_FIELDS)}")
        raise UsageError(f"unknown key {_shown(name)}", hint)
    _check_type(name, value)
    choices = _FIELDS[name].metadata["choices"]
    if choices and value not in choices:
        hint = suggestion(str(value), choices, f"choose from {', '.join(choices)}")
        raise UsageError(f"{flag(name)} can't be {_shown(value)}", hint)
    holds = {
        "at least": lambda limit: value >= limit,
        "above": lambda limit: value > limit,
        "at most": lambda limit: value <= limit,
        "below": lambda limit: value < limit,
    }
    for words, limit in _FIELDS[name].metadata["limits"].items():
        if not holds[words](limit):
            raise UsageError(
                f"{flag(name)} {_shown(value)} is out of range", f"it must be {words} {limit}"
            )


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


def _kind(name: str) -> type:
    """What a setting is when it is not None."""
    return next(kind for kind in _KINDS if _TYPES[name] in (kind, kind | None))


def _check_type(name: str, value: Setting) -> None:
    kind = _kind(name)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        # A whole number of a recipe may be too large for any float.
        fits = isinstance(value, int) or math.isfinite(value)
    else:
        fits = type(value) is kind
    if not fits:
        raise UsageError(f"{flag(name)} can't be {_shown(value)}", f"it must be {_KINDS[kind]}")


def _shown(value: object) -> str:
    """A value as a message shows it: cut short, and in words where Python can't write it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or tables within tables
        return "such a value"
    return text if len(text) < 50 else f"{text[:47]}…"


def load_recipe(name: str) -> Settings:
    """The settings of a recipe: one of the package's by name, a TOML file, or a run's config.json.

    Raises AttnlmError when there is none, or when it is neither TOML nor a run's configuration.
    Its settings are checked when they are resolved.
    """
    path = Path(name)
    builtin = resources.files("attnlm") / "recipes" / f"{name}.toml"
    try:
        if name in recipe_names():
            return tomllib.loads(builtin.read_text(encoding="utf-8"))
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
            f"the recipe {name} can't be understood: {reason}",
            "a recipe is a TOML file of `key = value` lines, or a run's config.json",
        ) from None
    if path.suffix == ".json":
        loaded = loaded.get("config") if isinstance(loaded, dict) else None
    if not isinstance(loaded, dict):
        raise AttnlmError(f"{name} is not a run's config.json", "give the file from a run's folder")
    return loaded


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files("attnlm") / "recipes"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml"))


def to_toml(settings: Mapping[str, Setting]) -> str:
    """A flat table as TOML, so that what `--print-config` shows is a recipe."""
    # JSON writes strings, numbers and booleans as TOML does.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
