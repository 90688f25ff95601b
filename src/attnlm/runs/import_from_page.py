"""Import models that a page trained: safetensors files with settings and vocabulary.

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

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.json_records import limited, record_from_json
from attnlm.config.settings import resolve
from attnlm.model.inspection import check_finite, parameter_count
from attnlm.runs.checkpoint import explaining_read_errors, save_checkpoint
from attnlm.runs.create_run import create_run_folder
from attnlm.runs.records import CheckpointFacts, DatasetFacts
from attnlm.runs.run import Run
from attnlm.tokens.tokenizer import CharTokenizer

_KEY = "attnlm"
_HINT = "save the model in the page again"


@dataclass(frozen=True, kw_only=True)
class PageModel:
    """The metadata of a model that a page trained."""

    settings: Mapping[str, Any]
    characters: str
    step: int = limited(at_least=0)
    text: str


def import_page_model(
    path: Path, block_size: int | None, name: str | None, checkpoint_dir: Path
) -> Run | None:
    """Create a run from a file that a page wrote, or return None for another safetensors file.

    Raises AttnlmError if the file is damaged, UsageError if a `block_size` is given.
    """
    with explaining_read_errors(path, " or not a safetensors file", _HINT):
        files.open_regular(path).close()
        with safe_open(path, "pt") as file:
            content = (file.metadata() or {}).get(_KEY)
            if content is None:
                return None
            if block_size is not None:
                what = "`block_size` does not apply to a model that a page trained"
                raise UsageError(what, "leave it out")
            metadata = record_from_json(PageModel, json.loads(content), path, _HINT)
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    config = resolve({}, metadata.settings)
    tokenizer = CharTokenizer(metadata.characters)
    shapes = config.spec.parameter_shapes(tokenizer.vocab_size)
    stored = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in weights.items()}
    if stored != {key: (shape, torch.float32) for key, shape in shapes.items()}:
        raise AttnlmError(f"{path} is damaged: its tensors are not those of its model", _HINT)
    check_finite(*weights.values())
    run = Run(
        Path(),
        config,
        vocab_size=tokenizer.vocab_size,
        parameters=parameter_count(config.spec, tokenizer.vocab_size),
        dataset=DatasetFacts(name=metadata.text),
        imported_from=str(path.absolute()),
    )
    facts = CheckpointFacts(step=metadata.step).content()
    return create_run_folder(
        run, tokenizer, name, checkpoint_dir, lambda run: save_checkpoint(run.best, weights, facts)
    )
