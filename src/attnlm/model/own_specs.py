"""Models with code of the user's own: parts in an Architecture, or a whole model.

Each is a ModelSpec. It is described without running the code: settings, name and context are known
from the run's configuration. The code runs when the model is built or measured. Importing this
module does not load torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from attnlm.base.errors import UsageError
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import Setting, Settings, fields_of
from attnlm.model.architecture import PRESETS, Architecture, architecture
from attnlm.model.costs import Costs
from attnlm.model.own_arguments import (
    build_module,
    check_forward,
    check_names,
    code_arguments,
    resolve_arguments,
    settings_of,
)
from attnlm.model.spec import ModelSpec, Shapes

if TYPE_CHECKING:
    from torch import Tensor

    from attnlm.model.language_model import LanguageModel

PREFIX = "set."
"""The prefix of the arguments of own code among the settings."""
CODE = "code"
"""The setting that records the SHA-256 of each file."""


@dataclass(frozen=True)
class _OwnSpec:
    """What models with own parts and own models have in common."""

    codes: Mapping[str, OwnCode]
    """the code of each part, or of the `model`"""
    arguments: Settings
    """the values of the code's arguments that have defaults, without PREFIX"""

    has_attention = has_matrices = slides = True

    def _code_settings(self) -> Settings:
        """Return the settings for the code: its names and its arguments."""
        return {**self.codes, **{PREFIX + name: value for name, value in self.arguments.items()}}

    def costs(self, vocab_size: int) -> Costs:
        """Return the costs, measured by a run of the model without numbers."""
        from attnlm.model.own_modules import measured_costs

        return measured_costs(self, max(1, vocab_size))  # type: ignore[arg-type]

    def parameter_shapes(self, vocab_size: int) -> Shapes:
        from attnlm.model.own_modules import model_for_shapes

        named = model_for_shapes(self, vocab_size).named_parameters()  # type: ignore[arg-type]
        return {name: tuple(parameter.shape) for name, parameter in named}

    def buffers(self, vocab_size: int) -> Mapping[str, Tensor]:
        from attnlm.model.inspection import stored_buffers
        from attnlm.model.own_modules import model_for_shapes

        return stored_buffers(model_for_shapes(self, vocab_size))  # type: ignore[arg-type]

    def with_defaults(self, chosen: Iterable[str] = ()) -> Self:
        """Return the description with each argument's value, after checking them.

        Raises UsageError for arguments that the code does not have or that have wrong values, and
        for `heads` among the settings that the user has `chosen`, if the attention takes none.
        """
        attention = self.codes.get("attention")
        if attention is not None and "heads" in chosen and "heads" not in code_arguments(attention):
            raise UsageError(
                f"`heads` has no effect: {attention} has no argument heads", "leave `heads` out"
            )
        defaults_of = {kind: settings_of(code, kind) for kind, code in self.codes.items()}
        check_names(self.arguments, set[str]().union(*defaults_of.values()), self.codes)
        values: Settings = {}
        for kind, defaults in defaults_of.items():
            values |= resolve_arguments(self.codes[kind], defaults, self.arguments)
        return replace(self, arguments=values)


@dataclass(frozen=True)
class OwnParts(_OwnSpec):
    """An Architecture in which own code replaces attention, MLP or attention scores."""

    architecture: Architecture
    """the model around the code; a part that own code replaces has the value OWN"""
    has_blocks = True

    @property
    def name(self) -> str:
        """Return the names of the preset and of the parts, such as multi-head-Temperature."""
        return "-".join([self.architecture.name, *(code.name for code in self.codes.values())])

    @property
    def block_size(self) -> int:
        return self.architecture.block_size

    @property
    def preset(self) -> str:
        return self.architecture.model

    def settings(self) -> Settings:
        # Positions can be changed in every model with own parts.
        settings = {**self.architecture.settings(), "positions": self.architecture.positions}
        unreplaced = {name: v for name, v in settings.items() if name not in self.codes}
        return unreplaced | self._code_settings()

    def build(self, vocab_size: int) -> LanguageModel:
        from attnlm.model.language_model import Transformer

        return Transformer(self.architecture, vocab_size, self)

    @functools.cached_property
    def lm_head_inputs(self) -> int:
        """Return the width of the blocks' output, which may differ in a model of one layer."""
        from attnlm.model.own_modules import output_width

        a = self.architecture
        width = output_width(self) if "attention" in self.codes else a.lm_head_inputs
        if width != a.lm_head_inputs and (a.residual or a.layers > 1 or a.mlp != "none"):
            raise UsageError(
                f"{self.codes['attention']} makes {width} features of {a.width}, and the residual "
                f"stream of {a.name} has {a.width}",
                f"return {a.width} features, or use it in a model of one layer, such as multi-head",
            )
        return width

    def make_module(self, kind: str, layer: int) -> Any:
        """Return a new module of the user's for a layer."""
        a = self.architecture
        sizes = {"embed_dim": a.width, "heads": a.heads, "block_size": a.block_size, "layer": layer}
        if kind == "scores":
            sizes["head_size"] = a.head_dim
        module = build_module(self.codes[kind], sizes, self.with_defaults().arguments)
        check_forward(self.codes[kind], kind, module)
        return module


@dataclass(frozen=True)
class OwnModel(_OwnSpec):
    """A class or function of vocab_size and block_size that returns a whole model."""

    block_size: int
    preset = ""
    has_blocks = False

    @property
    def code(self) -> OwnCode:
        """Return the code of the model."""
        return self.codes["model"]

    @property
    def name(self) -> str:
        """Return the name of the class or function."""
        return self.code.name

    def settings(self) -> Settings:
        return {"block_size": self.block_size, **self._code_settings()}

    def build(self, vocab_size: int) -> LanguageModel:
        from attnlm.model.own_modules import OwnLanguageModel

        sizes = {"vocab_size": vocab_size, "block_size": self.block_size}
        module = build_module(self.code, sizes, self.with_defaults().arguments)
        return OwnLanguageModel(self, vocab_size, module)


def own_parts(
    model: str, settings: Mapping[str, Setting], parts: Mapping[str, OwnCode]
) -> OwnParts:
    """Return a preset in which own code replaces some parts.

    `settings` are the preset's, and arguments of the code with PREFIX. Raises UsageError if
    the preset lacks a part or a setting, or if a setting has no effect.
    """
    preset = PRESETS[model]
    has = {**{name: part.default for name, part in fields_of(Architecture).items()}, **preset.parts}
    for kind in parts:
        replaced = "attention" if kind == "scores" else kind
        if has[replaced] == "none" or (kind == "scores" and has[replaced] != "softmax"):
            raise UsageError(
                f"{model} has no {replaced} that {kind} of your own could replace",
                "use `model` transformer" if kind == "mlp" else "use `model` multi-head",
            )
    if {"attention", "scores"} <= parts.keys():
        raise UsageError(
            "`attention` and `scores` cannot both be your own: the attention has the scores",
            "leave one out",
        )
    arguments = _without_prefix(settings)
    chosen = {k: v for k, v in settings.items() if not k.startswith(PREFIX)}
    if "attention" in parts and {**preset.parts, **chosen}.get("positions") == "rotary":
        if "positions" in chosen:
            raise UsageError(
                "`positions` rotary turns queries and keys, which are in the attention you replace",
                "use `positions` learned or none",
            )
        chosen["positions"] = "learned"
    return OwnParts(dict(parts), arguments, architecture(model, chosen, tuple(parts)))


def own_model(codes: Mapping[str, OwnCode], settings: Mapping[str, Setting]) -> OwnModel:
    """Return the description of a whole model of the user's.

    `settings` are the context, and arguments of the code with PREFIX. Raises UsageError for others.
    """
    for name in (*codes.keys() - {"model"}, *settings.keys() - {"block_size"}):
        if not name.startswith(PREFIX):
            raise UsageError(
                f"`{name}` does not apply to {codes['model']}: only `block_size` does",
                f"make it an argument of {codes['model'].name}, and `set` it",
            )
    block_size: Any = settings.get("block_size", fields_of(Architecture)["block_size"].default)
    return OwnModel({"model": codes["model"]}, _without_prefix(settings), block_size)


def _without_prefix(settings: Mapping[str, Setting]) -> Settings:
    return {k.removeprefix(PREFIX): v for k, v in settings.items() if k.startswith(PREFIX)}


def with_defaults(spec: ModelSpec, chosen: Iterable[str] = ()) -> ModelSpec:
    """Return a description with the defaults of its own code, which runs; others unchanged.

    `chosen` are the names of the settings that the user gave.
    """
    return spec.with_defaults(chosen) if isinstance(spec, OwnParts | OwnModel) else spec


WIDTHS = ("embed_dim", "n_embd", "d_model", "width", "hidden_size")
_HEADS = ("heads", "n_heads", "n_head", "num_heads")


def size_settings(spec: ModelSpec) -> tuple[str | None, str | None]:
    """Return the names of the settings that are a model's width and number of heads, if any.

    In a model of the user's they are arguments with usual names.
    """
    known = spec.settings()
    names = ((kind[0], *(PREFIX + name for name in kind)) for kind in (WIDTHS, _HEADS))
    width, heads = (next((n for n in kind if type(known.get(n)) is int), None) for kind in names)
    return width, heads
