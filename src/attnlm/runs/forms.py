"""What a model of ours is in another tool, and what each family of models there can express.

A form fits by the parts of a model, whatever its name. Where it has a bias, or positions, that the
model lacks, zeros stand for them, which changes no logit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeVar

from attnlm.base.errors import UsageError
from attnlm.base.suggestions import suggestion
from attnlm.model.architecture import Architecture

FORMATS = {"hf": (), "gguf": ("f32", "f16", "q8_0"), "html": ("f32", "f16")}
"""The formats that runs are exported to, and the types of number that each offers."""

Expressible = Mapping[str, Container[object] | None]
"""The values that a form can express, for each field of Architecture; None stands for all values.
Of a field that is missing here, only the default can be expressed."""


class Stored(NamedTuple):
    """A tensor of another tool: its name, and the parameters of ours that it holds, one after
    another along their outputs.

    Matrices may lie transposed. Of heads that are turned by their position, the two halves may lie
    interleaved: outputs 0, D/2, 1, D/2 + 1, … of each of `interleaved` heads.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: int = 0


@dataclass(frozen=True)
class Form:
    """A kind of model of another tool, and what it takes for one of ours to fit."""

    name: str
    expressible: Callable[[Architecture], Expressible]
    stored: Callable[[Architecture], Iterator[Stored]]
    """all tensors, in order; the LM head only where it is not the token embedding"""

    def reasons(self, a: Architecture) -> list[str]:
        """Return the parts of the model that this form can't express."""
        expressible = self.expressible(a)
        return [
            _in_words(field.name, value)
            for field in fields(a)
            if (allowed := expressible.get(field.name, (field.default,))) is not None
            and (value := getattr(a, field.name)) not in allowed
        ]


def _in_words(name: str, value: object) -> str:
    if value in (False, None, "none"):
        return f"no `{name}`"
    return f"`{name}`" if value is True else f"`{name}` {value}"


AnyForm = TypeVar("AnyForm", bound=Form)


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    form: str
    """the stock class of `transformers`, the architecture of llama.cpp, or what a page holds"""
    checkpoint: str
    """best or last; for a page with several runs, of each"""


def check_format(to: str, type: str | None) -> None:
    """Raises UsageError for an unknown format, or a type of number that it does not have."""
    _check_one_of(FORMATS, "to", to)
    if type is not None and not FORMATS[to]:
        raise UsageError("`type` is for `to` gguf and html", "leave `type` out: hf has float32")
    if type is not None:
        _check_one_of(FORMATS[to], "type", type)


def _check_one_of(words: Iterable[str], name: str, value: str) -> None:
    if value not in words:
        hint = suggestion(value, words, f"choose from {', '.join(words)}")
        raise UsageError(f"`{name}` can't be {value!r}", hint)


def form_for(a: Architecture, forms: Sequence[AnyForm], run: str, kind: str) -> AnyForm:
    """The form that expresses a model exactly. Raises UsageError, with reasons, if none does.

    `kind` is what the forms are, as in "architecture of llama.cpp".
    """
    hint = "train a model of the published shapes: `model` transformer, gpt2, llama or qwen3"
    if a.embed_dim is None:
        raise UsageError(
            f"no {kind} can express {run}: a bigram is a table of logits, without layers", hint
        )
    closest = min(forms, key=lambda form: len(form.reasons(a)))
    if reasons := closest.reasons(a):
        raise UsageError(
            f"no {kind} can express {run}: it has {', '.join(reasons)}; "
            f"the closest is {closest.name}",
            hint,
        )
    return closest


def gpt2_expressible(a: Architecture) -> Expressible:
    """Return what the family of GPT-2 can express."""
    return {
        **_COMMON,
        "kv_heads": (None, a.heads),
        "head_size": (None, (a.embed_dim or 0) / a.heads),
        "wide_heads": (False,),
        "query_key_norm": (False,),
        "positions": ("learned", "none"),
        "norm": ("layer",),
        "mlp": ("gelu", "relu2"),
    }


def llama_expressible(a: Architecture) -> Expressible:
    """Return what the family of Llama can express."""
    return {
        **_COMMON,
        "query_key_norm": (False,),
        "positions": ("rotary",),
        "norm": ("rms",),
        "mlp": ("swiglu",),
    }


def qwen3_expressible(a: Architecture) -> Expressible:
    """Return what the family of Qwen3 can express."""
    return {**llama_expressible(a), "query_key_norm": (True,), "bias": (False,)}


_ALL_VALUES = (
    *("model", "embed_dim", "layers", "block_size", "heads", "kv_heads", "head_size", "wide_heads"),
    *("qkv_bias", "rotary_base", "rotary_factor", "rotary_context", "norm_epsilon", "mlp_width"),
    *("bias", "tie_embeddings", "dropout"),
)
_COMMON: Expressible = {
    **dict.fromkeys(_ALL_VALUES),
    "attention": ("softmax",),
    "projection": (True,),
    "residual": (True,),
    "head_bias": (False,),
}
