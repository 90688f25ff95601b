"""A run for `transformers`: config, weights, tokenizer and a model card, in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.workspaces import workspace
from attnlm.runs.forms import Exported
from attnlm.runs.hugging_face.model_card import model_card
from attnlm.runs.hugging_face.stock_classes import StockClass, stock_class_for
from attnlm.runs.load_model import load_weights
from attnlm.runs.run import Run
from attnlm.runs.safetensors_file import write_tensors
from attnlm.runs.stored_tensors import StoredTensors
from attnlm.tokens.tokenizer_json import library_tokenizer


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
    tensors = StoredTensors(stock, run.config.model, load_weights(run, chosen))
    with files.explaining(folder, ", or name another folder"):
        _write(folder, content, tensors)
    return Exported(folder, stock.name, chosen.which)


def _check_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise AttnlmError(f"{folder} is not a folder", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise AttnlmError(f"the folder {folder} is not empty", "name a new folder")


def _write(folder: Path, content: dict[str, bytes], tensors: StoredTensors) -> None:
    with workspace(folder.absolute().parent) as work:
        new = work / "new"
        new.mkdir()
        for name, written in content.items():
            files.write_bytes(new / name, written)
        write_tensors(new / "model.safetensors", tensors.shapes, tensors.tensor)
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
    end, beginning = run.tokenizer.end_of_text, run.tokenizer.beginning
    first = end if beginning is None else beginning
    return {"bos_token_id": first, "eos_token_id": end, "pad_token_id": end}


def _tokenizer_files(run: Run) -> dict[str, bytes]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.config.model.block_size,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for key, token in _special_ids(run).items():
        if token is not None:
            config[key.removesuffix("_id")] = run.tokenizer.decode([token])
    tokenizer = library_tokenizer(run.tokenizer).to_str(pretty=False)
    return {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": _json(config)}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
