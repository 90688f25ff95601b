"""Make a page that runs models: their weights, tokenizers and a forward pass in JavaScript."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.model.architecture import Architecture
from attnlm.model.spec import UnsupportedError, require_architecture
from attnlm.runs.checkpoint import Array
from attnlm.runs.load_model import checked_weights
from attnlm.runs.run import Checkpoint, Run, run_summary
from attnlm.see.page import encode_base64, render
from attnlm.tokens.tokenizer import BpeTokenizer, CharTokenizer, IdsTokenizer, Tokenizer

_LARGEST_IN_F32 = 2_000_000
"""The largest number of parameters of a model that uses float32 by default; others use float16."""
_MOST_TO_TRY = 2_000_000
"""The limit for the parameters of models beside other content, for a page of about 10 MB."""


def models_to_try(runs: Mapping[str, Run], checkpoint: str = "auto") -> list[dict[str, Any]]:
    """Return `run_data` of runs, by the names that a page shows.

    The result is empty if the models are too large, or if a page cannot run one of them.
    """
    from attnlm.model.inspection import ChangedModelError  # loads torch

    if sum(run.parameters for run in runs.values()) <= _MOST_TO_TRY:
        with contextlib.suppress(ChangedModelError, UnsupportedError):
            return [run_data(run, run.checkpoint(checkpoint), name=n) for n, run in runs.items()]
    return []


def run_data(
    run: Run,
    checkpoint: Checkpoint,
    number_type: str | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Return `model_data` for a run's checkpoint; default name: the run's.

    The values say how the run was trained. Raises as `checked_weights` does.
    """
    summary = run_summary(run)
    origin = f"trained on {run.dataset.name}"
    if run.imported_from:
        origin = f"imported from {run.imported_from}"
    elif (result := run.result()) is not None:
        origin += f" to a loss of {result.final.val_loss:.2f}"
    a = require_architecture(run.config.spec, "a page that computes")
    weights = checked_weights(run, checkpoint)
    description = f"{a.name}, {run.parameters:,} parameters, {origin}"
    return model_data(
        name or run.name, a, weights, run.tokenizer, description, number_type, summary
    )


def first_text(runs: Sequence[Run]) -> str:
    """Return the start of the validation split, as the first run recorded it.

    Returns "" if there is no run, if this run recorded no text, if the text has an incomplete
    character, or if the tokenizer of one of `runs` can't encode the text.
    """
    text = "".join(runs[0].ticker_passage()) if runs else ""
    try:
        for run in runs:
            run.tokenizer.encode(text)
    except AttnlmError:
        return ""
    return "" if "\ufffd" in text else text


def play_page(models: Sequence[dict[str, Any]], prompt: str = "", title: str = "") -> bytes:
    """Return an HTML file, in UTF-8, that runs models; `prompt` is the initial text in the page.

    The default title is the models' names.
    """
    data = {"models": models, "prompt": prompt, "title": title}
    return render("play.html", script="play_page.js", data=data)


def model_data(
    name: str,
    a: Architecture,
    tensors: Mapping[str, Array],
    tokenizer: Tokenizer,
    description: str,
    number_type: str | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a model's JSON values for `unpackModels` in unpack_models.js, with tensors in base64.

    The page shows `description` and, on demand, `summary` by label. `number_type` is f32 or
    f16 (default: f32 up to 2 million parameters, f16 above).
    """
    numbers = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    if number_type is None:
        number_type = "f32" if numbers.size <= _LARGEST_IN_F32 else "f16"
    with np.errstate(over="ignore"):
        numbers = numbers.astype({"f32": "<f4", "f16": "<f2"}[number_type])
    if not np.isfinite(numbers).all():
        raise AttnlmError(f"{name} has weights too large for {number_type}", "use `type` f32")
    return {
        "name": name,
        "description": description,
        "about": {**(summary or {})},
        "architecture": architecture_data(a),
        "shapes": {tensor: list(tensors[tensor].shape) for tensor in tensors},
        "type": number_type,
        "weights": encode_base64(numbers),
        "tokenizer": _tokenizer_data(tokenizer),
        "first": tokenizer.first,
    }


def architecture_data(a: Architecture) -> dict[str, Any]:
    """Return the parts and sizes of a model as JSON values for model_structure.js."""
    architecture = {field.name: getattr(a, field.name) for field in fields(a) if field.metadata}
    if a.embed_dim is not None:
        architecture |= {"head_size": a.head_dim, "kv_heads": a.num_kv_heads}
    if a.mlp != "none":
        architecture["mlp_width"] = a.mlp_dim
    return {part: x for part, x in architecture.items() if x is not None}


def _tokenizer_data(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the JSON values from which tokenizers.js builds the same tokenizer."""
    end = tokenizer.end_text
    if isinstance(tokenizer, CharTokenizer):
        return {"kind": "char", "characters": tokenizer.characters, "end": end}
    if isinstance(tokenizer, BpeTokenizer):
        return {
            "kind": "pairs",
            "tokens": "\u0100".join(token.decode("latin-1") for token in tokenizer.ranks),
            "pattern": _in_javascript(tokenizer.pattern),
            "special": tokenizer.special,
            "nfc": tokenizer.nfc,
        }
    if isinstance(tokenizer, IdsTokenizer):
        return {"kind": "ids", "size": tokenizer.vocab_size}
    return {"kind": "bytes", "end": end}


def _in_javascript(pattern: str) -> str:
    """Return a pattern that finds the same words in JavaScript with flag `u`. JavaScript lacks
    possessive quantifiers and case-insensitive groups, and its \\s matches other characters."""

    def any_case(letters: re.Match[str]) -> str:
        """Return a letter, or a class of letters, as a class with their capitals."""
        small = letters[0].strip("[]")
        return f"[{small}{small.upper()}{'ſ' if 's' in small else ''}]"

    def without_flag(group: re.Match[str]) -> str:
        return "(?:" + re.sub(r"\[[a-z]+\]|[a-z]", any_case, group[1]) + ")"

    pattern = re.sub(r"([+*?]|\{\d+,\d+\})\+", r"\1", pattern)
    pattern = pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
    return re.sub(r"\(\?i:([^()]*)\)", without_flag, pattern)
