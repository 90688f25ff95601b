"""Read models that a page trained: safetensors files with settings and vocabulary.

see/pages/saved_files.js writes such a file. Its metadata has the key `attnlm`, a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import limited, record_from_json
from attnlm.config.settings import Config, resolve
from attnlm.model.inspection import check_finite
from attnlm.runs.checkpoint import explaining_read_errors
from attnlm.tokens.tokenizer import CharTokenizer, Tokenizer

_HINT = "save the model in the page again"


@dataclass(frozen=True, kw_only=True)
class PageModel:
    """The metadata of a model that a page trained."""

    settings: Mapping[str, Any]
    characters: str
    step: int = limited(at_least=0)
    text: str


def read_page_model(path: Path) -> tuple[Config, Tokenizer, dict[str, Tensor], str, int] | None:
    """Return configuration, tokenizer, weights, text and step of a model that a page saved.

    Return None for any other safetensors file. Raises AttnlmError if the file is damaged.
    """
    with explaining_read_errors(path, " or not a safetensors file", _HINT):
        files.open_regular(path).close()
        with safe_open(path, "pt") as file:
            content = (file.metadata() or {}).get("attnlm")
            if content is None:
                return None
            saved = record_from_json(PageModel, json.loads(content), path, _HINT)
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    config, tokenizer = resolve({}, saved.settings), CharTokenizer(saved.characters)
    shapes = config.spec.parameter_shapes(tokenizer.vocab_size)
    stored = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in weights.items()}
    if stored != {key: (shape, torch.float32) for key, shape in shapes.items()}:
        raise AttnlmError(f"{path} is damaged: its tensors are not those of its model", _HINT)
    check_finite(*weights.values())
    return config, tokenizer, weights, saved.text, saved.step
