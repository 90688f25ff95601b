"""A page in which models compute: their weights, tokenizers and a forward pass in JavaScript."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

from attnlm.model.architecture import Architecture
from attnlm.runs.run import Run
from attnlm.see.page import render
from attnlm.tokens.tokenizer import BpeTokenizer, CharTokenizer, Tokenizer

LARGEST_IN_F32 = 2_000_000
"""Parameters: above, float16 is the default."""
LARGEST = 60_000_000
"""Parameters: above, a page is made only when it is forced."""


class PlayModel(NamedTuple):
    """A model of a page: what is computed, and what a reader is told of it."""

    name: str
    architecture: Architecture
    weights: Mapping[str, Tensor]
    """By the names of the model's parameters; adapters are folded in."""
    tokenizer: Tokenizer
    told: str
    """One sentence: its kind, its size, its data."""


def play_model(run: Run, weights: Mapping[str, Tensor]) -> PlayModel:
    """Return a run's model for a page."""
    size = f"{run.config.model.model}, {run.parameters:,} parameters"
    told = f"{run.name}: {size}, trained on {run.dataset['name']}."
    return PlayModel(run.name, run.config.model, weights, run.tokenizer, told)


def play_page(
    models: Sequence[PlayModel], number_type: str | None = None, prompt: str = ""
) -> bytes:
    """Return one HTML file, in UTF-8, in which models compute.

    `number_type` is f32 or f16; default: f32 up to 2 million parameters, f16 above. `prompt` is the
    text that the page begins with.
    """
    return render(
        "play.html",
        scripts=("model.js", "tokenizers.js", "play.js"),
        data=[_described(model, number_type) for model in models],
        title=f"Play with {', '.join(model.name for model in models)}",
        models=models,
        prompt=prompt,
    )


def _described(model: PlayModel, number_type: str | None) -> dict[str, Any]:
    """Return the JSON values that `unpackModels` reads: the numbers of all tensors in base64."""
    tensors = model.weights
    if number_type is None:
        parameters = sum(tensor.numel() for tensor in tensors.values())
        number_type = "f32" if parameters <= LARGEST_IN_F32 else "f16"
    dtype = {"f32": "<f4", "f16": "<f2"}[number_type]
    content = b"".join(
        tensor.contiguous().numpy().astype(dtype).tobytes() for tensor in tensors.values()
    )
    return {
        "name": model.name,
        "architecture": described_architecture(model.architecture),
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "type": number_type,
        "weights": base64.b64encode(content).decode(),
        "tokenizer": described_tokenizer(model.tokenizer),
        "first": first_id(model.tokenizer),
    }


def described_architecture(a: Architecture) -> dict[str, Any]:
    """Return the fields that are set, with the size of a head and the key and value heads."""
    values = {field.name: getattr(a, field.name) for field in fields(a)}
    if a.embed_dim is not None:
        values |= {"head_size": a.head_dim, "kv_heads": a.num_kv_heads}
    return {name: value for name, value in values.items() if value is not None}


def described_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizers.js makes the same tokenizer of."""
    if isinstance(tokenizer, CharTokenizer):
        return {"kind": "char", "characters": tokenizer.characters}
    if isinstance(tokenizer, BpeTokenizer):
        return {
            "kind": "pairs",
            "tokens": " ".join(base64.b64encode(token).decode() for token in tokenizer.ranks),
            "pattern": in_javascript(tokenizer.pattern),
            "special": tokenizer.special,
            "nfc": tokenizer.nfc,
        }
    return {"kind": "bytes"}


def in_javascript(pattern: str) -> str:
    """Return a pattern of ours for JavaScript's flag `u`: it has no possessive quantifiers there,
    another \\s, and no part without regard to case. The words that it finds are the same."""
    pattern = re.sub(r"([+*?]|\{\d+,\d+\})\+", r"\1", pattern)
    pattern = pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
    return re.sub(r"\(\?i:([^()]*)\)", lambda part: f"(?:{_any_case(part[1])})", pattern)


def _any_case(letters: str) -> str:
    """Return a pattern of single letters, classes of letters and | that matches capitals too."""
    in_class = letters.replace("[sdmt]", "[sSſdDmMtT]")
    outside = re.split(r"(\[[^]]*\])", in_class)
    both = [part if i % 2 else re.sub("[a-z]", _both, part) for i, part in enumerate(outside)]
    return "".join(both)


def _both(letter: re.Match[str]) -> str:
    lower = letter[0]
    return f"[{lower}{lower.upper()}{'ſ' if lower == 's' else ''}]"


def first_id(tokenizer: Tokenizer) -> int:
    """Return the id that `attnlm sample` begins with where there is no prompt."""
    choices = (tokenizer.beginning, tokenizer.newline, tokenizer.end_of_text)
    return next((token for token in choices if token is not None), 0)
