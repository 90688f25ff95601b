"""Descriptions of models, as runs record them.

An Architecture is one implementation. Code outside of `model` asks a ModelSpec and calls the
LanguageModel that it builds. Code that needs the parts of a model, such as an export, gets them
from `require_architecture`, which refuses other implementations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeGuard

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings

if TYPE_CHECKING:
    from attnlm.base.own_code import OwnCode
    from attnlm.model.architecture import Architecture
    from attnlm.model.costs import Costs
    from attnlm.model.language_model import LanguageModel

Shapes = Mapping[str, tuple[int, ...]]


class ModelSpec(Protocol):
    """The description of a model. config.json records its settings."""

    @property
    def name(self) -> str:
        """Return what tables and names of runs call the model, such as multi-head."""

    @property
    def preset(self) -> str:
        """Return the preset whose training defaults the model has; "" for none."""

    @property
    def block_size(self) -> int:
        """Return the context: the most tokens that the model sees."""

    @property
    def codes(self) -> Mapping[str, OwnCode]:
        """Return the user's own code by what it replaces; empty for our models."""

    @property
    def arguments(self) -> Settings:
        """Return the values of own code's arguments that have defaults, by name."""

    @property
    def has_attention(self) -> bool:
        """Return True if the model may have attention maps; those of own code are observed."""

    @property
    def has_matrices(self) -> bool:
        """Return True if Muon may update matrices of the model."""

    @property
    def slides(self) -> bool:
        """Return True if a full context slides by one token.

        That is exact for one layer only. With several layers, rotary positions or an MLP, the model
        keeps the newer half of a full context and computes it again.
        """

    def settings(self) -> Settings:
        """Return the settings that together define the model."""

    def build(self, vocab_size: int) -> LanguageModel:
        """Return a model, initialised from torch's global random state."""

    def costs(self, vocab_size: int) -> Costs:
        """Return sizes and operations of the model, without building it."""

    def parameter_shapes(self, vocab_size: int) -> Shapes:
        """Return the shape of each parameter by its name, without its numbers."""


def is_ours(spec: ModelSpec) -> TypeGuard[Architecture]:
    """Return True for an architecture without own code."""
    return not spec.codes


def own_code_reason(spec: ModelSpec) -> str | None:
    """Return why code that knows our parts alone can't compute a model; None if it can."""
    return f"it computes {' and '.join(spec.codes.values())}" if spec.codes else None


class UnsupportedError(UsageError):
    """Raised when code that computes models by their parts does not know a model."""


def require_architecture(spec: ModelSpec, purpose: str, lacking: str | None = None) -> Architecture:
    """Return a spec as an Architecture, for code that needs its parts for a purpose.

    Raises UnsupportedError for own code, and if `lacking` says what that code does not know.
    """
    reason = own_code_reason(spec) or lacking
    if reason is None and is_ours(spec):
        return spec
    raise UnsupportedError(f"{spec.name} cannot have {purpose}: {reason}", "use another model")


def parameter_count(spec: ModelSpec, vocab_size: int) -> int:
    """Return the number of parameters of the model; tied parameters count once."""
    return sum(map(math.prod, spec.parameter_shapes(vocab_size).values()))
