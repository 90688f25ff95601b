"""Make a page in which a reader trains models: a text, the settings of each rung, and a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.formatting import quantity
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import Config, resolve
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import RUNGS, Architecture
from attnlm.model.spec import ModelSpec, is_ours, own_code_reason, require_architecture
from attnlm.see.model_page import architecture_data
from attnlm.see.page import render

MOST_TEXT = 2**20
"""The most bytes of text in a page, in UTF-8: nine tenths of it for training."""
_MOST = {"train": MOST_TEXT * 9 // 10, "val": MOST_TEXT // 10}
_BATCH = 512  # tokens
_CONTEXT = 32
_STEPS = 3000
_SMALL: dict[str, Settings] = {"transformer": {"embed_dim": 64, "steps": 800}}
# AdamW learns best with lower learning rates here than with the larger batches of `train`.
_RATES = {"single-head": 0.004, "multi-head": 0.006, "wide-head": 0.004, "transformer": 0.004}
_DEFAULT = "multi-head"


def train_page(
    text: Mapping[str, Any],
    models: Sequence[dict[str, Any]] = (),
    spec: ModelSpec | None = None,
    title: str = "",
) -> bytes:
    """Return an HTML file, in UTF-8, that trains the rungs of the ladder on a text.

    `text` is of `training_text`, and `models` are of `model_data`. `spec` describes a model that
    the page offers first, in place of its rung. `title` is the heading; default: the name of the
    text. Raises UnsupportedError if the trainer does not know the model.
    """
    configs = {
        rung: _config({"model": rung, "block_size": _CONTEXT, **_SMALL.get(rung, {})})
        for rung in RUNGS
    }
    first = _DEFAULT
    if spec is not None:
        _trainable(spec)
        first = spec.name
        configs[first] = _config(spec.settings())
    data = {
        "models": models,
        "title": title,
        "prompt": text["validation"].lstrip()[:28].partition("\n")[0],
        "training": {
            "rungs": {rung: _rung_data(config) for rung, config in configs.items()},
            "rung": first,
            "text": text,
        },
    }
    return render_train_page(data)


def unsupported(spec: ModelSpec) -> str | None:
    """Return why the trainer of a page does not know a model; None if it does."""
    if not is_ours(spec):
        return own_code_reason(spec)
    needed = {
        "RMS norm or no norm": spec.norm != "layer",
        "a SwiGLU MLP or no MLP": spec.mlp in ("swiglu", "none"),
        "no dropout": not spec.dropout,
    }
    lacking = [words for words, is_there in needed.items() if not is_there]
    return f"it needs {' and '.join(lacking)}" if lacking else None


def _trainable(spec: ModelSpec) -> Architecture:
    return require_architecture(spec, "training in a page", unsupported(spec))


def render_train_page(data: Mapping[str, Any]) -> bytes:
    """Return the page of JSON values that `train_page` made."""
    text = data["training"]["text"]["name"]
    data = {"title": "", **data}  # a page that was saved has no title
    return render(
        "train.html", script="train_page.js", worker="train_worker.js", data=data, text=text
    )


def _config(model: Settings) -> Config:
    """Return the configuration of a model with these settings, trained in a page."""
    training: Settings = {"optimizer": "adamw", "steps": _STEPS}
    training["batch_size"] = max(1, _BATCH // int(model["block_size"]))
    if (rate := _RATES.get(str(model["model"]))) is not None:
        training["learning_rate"] = rate
    return resolve({**training, **model})


def _rung_data(config: Config) -> dict[str, Any]:
    """Return the JSON values of a rung: its parts, parameters and settings."""
    a = _trainable(config.spec)
    return {
        "architecture": architecture_data(a),
        "parameters": parameters_data(a),
        "settings": config.settings(),
    }


def parameters_data(a: Architecture) -> list[dict[str, Any]]:
    """Return the name, shape and distribution of each new parameter, for initial_weights.js.

    In a shape, "V" is the size of the vocabulary.
    """
    from attnlm.model.building import initial_distributions  # loads torch

    shapes = a.parameter_shapes(2)
    larger = a.parameter_shapes(3)
    return [
        {
            "name": name,
            "shape": [
                "V" if n != m else n for n, m in zip(shapes[name], larger[name], strict=True)
            ],
            kind: number,
        }
        for name, (kind, number) in initial_distributions(a, 2).items()
    ]


def training_text(dataset: Dataset, on_event: OnEvent = ignore) -> dict[str, Any]:
    """Return the text of a data set for a page: at most the first 1 MB, which a Note says.

    Raises AttnlmError if a split is too short for the rungs.
    """
    texts = {split: _beginning(dataset, split) for split in _MOST}
    is_whole = all(texts[split][1] for split in texts)
    if not is_whole:
        on_event(Note(f"the page has the first {quantity(MOST_TEXT, 'B')} of {dataset.name}"))
    return {
        "name": dataset.name,
        "train": texts["train"][0],
        "validation": texts["val"][0],
        "floor": dataset.floor if is_whole and dataset.tokenizer.name == "char" else None,
    }


def _beginning(dataset: Dataset, split: str) -> tuple[str, bool]:
    """Return the beginning of a split, and True if it is the whole split."""
    ids = dataset.train if split == "train" else dataset.val
    most = _MOST[split]
    utf8 = dataset.tokenizer.decode_bytes(ids[:most].tolist())
    text = utf8[:most].decode(errors="ignore")
    if dataset.tokenizer.end_text:
        text = text.replace(dataset.tokenizer.end_text, "\n")
    return text, len(ids) <= most and len(utf8) <= most
