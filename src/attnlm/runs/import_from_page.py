"""Import models that a page trained: safetensors files with settings and vocabulary.

see/pages/saved_files.js writes such a file. Its metadata has the key `attnlm`, a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.base.json_records import limited, record_from_json
from attnlm.config.settings import resolve
from attnlm.model.inspection import parameter_count
from attnlm.runs.checkpoint import save_one_by_one
from attnlm.runs.create_run import create_run_folder
from attnlm.runs.hugging_face.read_model import open_tensors
from attnlm.runs.records import CheckpointFacts, DatasetFacts
from attnlm.runs.run import Run
from attnlm.runs.safetensors_file import Array, check_finite, explaining_read_errors
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


def is_page_model(path: Path) -> bool:
    """Return True for a safetensors file that a page wrote. Raises AttnlmError for other files."""
    with open_tensors(path) as file:
        return _KEY in file.metadata


def import_page_model(path: Path, *, name: str | None, checkpoint_dir: Path) -> Run:
    """Create a run from a file that a page wrote. Raises AttnlmError if it is damaged."""
    with open_tensors(path) as file:
        with explaining_read_errors(path, "", _HINT):
            content = json.loads(file.metadata[_KEY])
        metadata = record_from_json(PageModel, content, path, _HINT)
        config = resolve({}, metadata.settings)
        tokenizer = CharTokenizer(metadata.characters)
        shapes = config.spec.parameter_shapes(tokenizer.vocab_size)
        stored_tensors = {n: (t.shape, t.dtype) for n, t in file.tensors.items()}
        if stored_tensors != {n: (shape, "F32") for n, shape in shapes.items()}:
            raise AttnlmError(f"{path} is damaged: its tensors are not those of its model", _HINT)

        def read_weight(name: str) -> Array:
            tensor = file.read(name)
            check_finite(tensor)
            return tensor

        def add_checkpoint(run: Run) -> None:
            facts = CheckpointFacts(step=metadata.step).content()
            save_one_by_one(run.best, shapes, read_weight, facts)

        run = Run(
            Path(),
            config,
            vocab_size=tokenizer.vocab_size,
            parameters=parameter_count(config.spec, tokenizer.vocab_size),
            dataset=DatasetFacts(name=metadata.text),
            imported_from=str(path.absolute()),
        )
        return create_run_folder(run, tokenizer, name, checkpoint_dir, add_checkpoint)
