"""A run for `transformers`: config, weights, tokenizer and a model card, in one folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import workspace
from attnlm.model.architecture import Architecture
from attnlm.runs.hugging_face.model_card import model_card
from attnlm.runs.hugging_face.stock_classes import StockClass, Stored, stock_class_for
from attnlm.runs.run import Run
from attnlm.runs.tensor_file import Shape, write_in_turn
from attnlm.runs.weights import load_weights
from attnlm.tokens.tokenizer import END_OF_TEXT
from attnlm.tokens.tokenizer_json import library_tokenizer


@dataclass(frozen=True)
class Exported:
    """What `export_to_hf` wrote."""

    path: Path
    stock_class: str
    """of `transformers`"""
    checkpoint: str
    """best or last"""


def export_to_hf(run: Run, folder: Path, *, checkpoint: str = "auto") -> Exported:
    """Writes a run's checkpoint to a new folder that `transformers` loads.

    The folder is written whole or not at all. Raises UsageError for a model that no stock class can
    express, AttnlmError when the folder is not empty, when files are missing or damaged, and when
    the installed `tokenizers` can't express the tokenizer.
    """
    stock = stock_class_for(run.config.model, run.name)
    _check_free(folder)
    chosen = run.checkpoint(checkpoint)
    content = {
        **_tokenizer_files(run),
        "config.json": _json(_config(stock, run)),
        "generation_config.json": _json(_generation(run)),
        "README.md": model_card(run, chosen, stock.name).encode(),
    }
    _, weights = load_weights(run, chosen.path)
    with files.explaining(folder, "free some space, or name another folder"):
        _write(folder, content, _Tensors(stock, run.config.model, weights))
    return Exported(folder, stock.name, chosen.which)


def _check_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise AttnlmError(f"{folder} is not a folder", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise AttnlmError(f"the folder {folder} is not empty", "name a new folder")


def _write(folder: Path, content: dict[str, bytes], tensors: _Tensors) -> None:
    with workspace(folder.absolute().parent) as work:
        new = work / "new"
        new.mkdir()
        for name, written in content.items():
            files.write_bytes(new / name, written)
        write_in_turn(
            new / "model.safetensors", tensors.shapes, tensors.tensor, lambda: {"format": "pt"}
        )
        _check_free(folder)
        if folder.is_dir():
            folder.rmdir()
        new.rename(folder)


def _config(stock: StockClass, run: Run) -> dict[str, Any]:
    return {
        "architectures": [stock.name],
        "model_type": stock.model_type,
        "vocab_size": run.vocab_size,
        **stock.config(run.config.model),
        "tie_word_embeddings": run.config.model.tie_embeddings,
        **_special_ids(run),
        "use_cache": True,
        "dtype": "float32",
    }


def _generation(run: Run) -> dict[str, Any]:
    """As `attnlm sample` does by default: from all tokens, at temperature 1."""
    return {**_special_ids(run), "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def _special_ids(run: Run) -> dict[str, Any]:
    """Also where there are none: the classes have ids by default, those of other vocabularies."""
    end = run.tokenizer.end_of_text
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def _tokenizer_files(run: Run) -> dict[str, bytes]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.config.model.block_size,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if run.tokenizer.end_of_text is not None:
        config |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    tokenizer = library_tokenizer(run.tokenizer).to_str(pretty=False)
    return {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": _json(config)}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


class _Tensors:
    """The tensors of a stock class, each made when it is asked for."""

    def __init__(self, stock: StockClass, a: Architecture, weights: Mapping[str, Tensor]) -> None:
        self._architecture, self._weights = a, weights
        self._stored = {stored.name: stored for stored in stock.stored(a)}
        self.shapes = {name: self._shape(stored) for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        parts = [self._weight(part) for part in stored.parts]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.T if stored.transposed else joined

    def _weight(self, name: str) -> Tensor:
        """A parameter of the model, zeros for a bias or positions that it lacks."""
        return self._weights[name] if name in self._weights else torch.zeros(self._whole(name))

    def _shape(self, stored: Stored) -> Shape:
        rows = sum(self._whole(part)[0] for part in stored.parts)
        columns = self._whole(stored.parts[0])[1:]
        return (*columns, rows) if stored.transposed else (rows, *columns)

    def _whole(self, name: str) -> Shape:
        """The shape of a parameter that the model has, or could have."""
        if name in self._weights:
            return tuple(self._weights[name].shape)
        if name == "position_embedding.weight":
            return self._architecture.block_size, self._architecture.embed_dim or 0
        stem = name.removesuffix(".bias")
        of = f"{stem}.weight" if f"{stem}.weight" in self._weights else f"{stem}.gain"
        return (len(self._weights[of]),)
