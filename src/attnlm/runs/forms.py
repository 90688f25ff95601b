"""What a model of ours is in another tool, and what each family of models there can't express.

A form fits by the parts of a model, whatever its name. Where it has a bias, or positions, that the
model lacks, zeros stand for them, which changes no logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from attnlm.base.errors import UsageError
from attnlm.base.suggestions import suggestion
from attnlm.model.architecture import Architecture

FORMATS = {"hf": (), "gguf": ("f32", "f16", "q8_0")}
"""The formats that runs are exported to, and the types of number that each offers, first the
default."""

Misfits = dict[str, bool]
"""What a model may have that a form can't express, and whether this one has it."""


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
    misfits: Callable[[Architecture], Misfits]
    stored: Callable[[Architecture], Iterator[Stored]]
    """all tensors, in order; the LM head only where it is not the token embedding"""

    def reasons(self, a: Architecture) -> list[str]:
        """Why the model does not fit; nothing where it does."""
        return [reason for reason, holds in {**_misfits(a), **self.misfits(a)}.items() if holds]


AnyForm = TypeVar("AnyForm", bound=Form)


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    form: str
    """the stock class of `transformers`, or the architecture of llama.cpp"""
    checkpoint: str
    """best or last"""


def check_format(to: str, type: str | None) -> None:
    """Raises UsageError for an unknown format, or a type of number that it does not have."""
    _check_one_of(FORMATS, "to", to)
    if type is not None and not FORMATS[to]:
        raise UsageError("`type` is for `to` gguf", "leave `type` out: hf has float32")
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


def _misfits(a: Architecture) -> Misfits:
    """What no form has."""
    return {
        f"`attention` {a.attention}": a.attention != "softmax",
        "no `projection`": a.attention == "softmax" and not a.projection,
        "no `residual`": not a.residual,
        "no `mlp`": a.mlp == "none",
        "no `norm`": a.norm == "none",
        "a `head_bias`": a.head_bias,
    }


def gpt2_misfits(a: Architecture) -> Misfits:
    """What the family of GPT-2 lacks."""
    return {
        "`positions` rotary": a.positions == "rotary",
        "`norm` rms": a.norm == "rms",
        "`mlp` swiglu": a.mlp == "swiglu",
        "`query_key_norm`": a.query_key_norm,
        "fewer `kv_heads` than `heads`": a.num_kv_heads != a.heads,
        "a `head_size` that is not `embed_dim` / `heads`": a.heads * a.head_dim != a.embed_dim,
    }


def llama_misfits(a: Architecture) -> Misfits:
    """What the family of Llama lacks."""
    return {
        f"`positions` {a.positions}": a.positions != "rotary",
        "`norm` layer": a.norm == "layer",
        f"`mlp` {a.mlp}": a.mlp in ("gelu", "relu2"),
        "`query_key_norm`": a.query_key_norm,
    }


def qwen3_misfits(a: Architecture) -> Misfits:
    """What the family of Qwen3 lacks, or must have."""
    return {
        **llama_misfits(a),
        "`query_key_norm`": False,
        "no `query_key_norm`": not a.query_key_norm,
        "a `bias` in the MLP": a.bias,
    }
