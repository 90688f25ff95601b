"""A whole model of the user's own, as a ModelSpec. Importing this module does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnlm.base.errors import UsageError
from attnlm.base.own_code import OwnCode
from attnlm.base.setting_fields import Setting, Settings, fields_of
from attnlm.model.architecture import Architecture
from attnlm.model.costs import Costs
from attnlm.model.own_arguments import PREFIX
from attnlm.model.spec import ModelSpec, Shapes

if TYPE_CHECKING:
    from attnlm.model.language_model import LanguageModel


@dataclass(frozen=True)
class OwnModel:
    """A class or function of vocab_size and block_size that returns a whole model."""

    code: OwnCode
    block_size: int
    arguments: Settings = field(hash=False)
    """the values of the code's arguments that have defaults, by name"""
    preset = ""
    has_attention = has_matrices = slides = True

    @property
    def codes(self) -> Mapping[str, OwnCode]:
        return {"model": self.code}

    @property
    def name(self) -> str:
        """Return the name of the class or function."""
        return self.code.name

    def settings(self) -> Settings:
        values = {PREFIX + name: value for name, value in self.arguments.items()}
        return {"block_size": self.block_size, "model": self.code, **values}

    def build(self, vocab_size: int) -> LanguageModel:
        from attnlm.model.own_modules import OwnLanguageModel

        return OwnLanguageModel(self, vocab_size)

    def costs(self, vocab_size: int) -> Costs:
        """Return the costs, measured by a run of the model."""
        from attnlm.model.own_modules import measured_costs

        return measured_costs(self, vocab_size)

    def parameter_shapes(self, vocab_size: int) -> Shapes:
        from attnlm.model.own_modules import built_shapes

        return built_shapes(self, vocab_size)


def own_model(code: OwnCode, settings: Mapping[str, Setting], arguments: Settings) -> OwnModel:
    """Return the description of a whole model of the user's.

    Raises UsageError for settings other than the context.
    """
    for name in settings:
        if name != "block_size":
            raise UsageError(
                f"`{name}` does not apply to {code}: only `block_size` does",
                f"make it an argument of {code.name}, and `set` it",
            )
    block_size: Any = settings.get("block_size", fields_of(Architecture)["block_size"].default)
    return OwnModel(code, block_size, arguments)


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
