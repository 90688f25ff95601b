"""A run for llama.cpp: metadata, tokenizer and tensors, in one GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.runs.facts import facts
from attnlm.runs.forms import Exported, check_format
from attnlm.runs.gguf.architectures import GgufArchitecture, architecture_for
from attnlm.runs.gguf.tensor_types import converted, type_of
from attnlm.runs.gguf.vocabulary import encodes_alike, vocabulary
from attnlm.runs.load_model import load_weights
from attnlm.runs.run import Checkpoint, Run
from attnlm.runs.stored_tensors import StoredTensors
from attnlm.text.text_files import optional

_SUFFIX = ".gguf"
_CONTEXT_STEP = 256  # tokens: llama.cpp rounds contexts up to a multiple
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # as llama.cpp numbers them


def export_to_gguf(
    run: Run,
    path: Path,
    *,
    checkpoint: str = "auto",
    type: str = "f32",
    on_event: OnEvent = ignore,
) -> Exported:
    """Writes a run's checkpoint to a new file that llama.cpp loads; `type` is f32, f16 or q8_0.

    The file is written whole or not at all. Notes say what llama.cpp does differently all the same.
    Raises UsageError for an unknown type, for a name that does not end with .gguf, and for a model
    that no architecture of llama.cpp can express; AttnlmError when the file exists, when files are
    missing or damaged, without the package `gguf`, and where the tokenizer, or a number in this
    type, can't be expressed.
    """
    check_format("gguf", type)
    form = architecture_for(run.config.model, run.name)
    if path.suffix != _SUFFIX:
        raise UsageError(
            f"the name of a GGUF file must end with {_SUFFIX}", f"name it {path.name}{_SUFFIX}"
        )
    _check_free(path)
    optional("gguf", "writing GGUF")
    chosen = run.checkpoint(checkpoint)
    tokens = _below("tokenizer.ggml", vocabulary(run.tokenizer))
    metadata = {**_metadata(form, run, chosen, type), **tokens}
    tensors = StoredTensors(form, run.config.model, load_weights(run, chosen))
    with files.explaining(path, ", or name another file"):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        _write(path, form.name, metadata, tensors, type)
    for text in _limits(run, form):
        on_event(Note(text))
    return Exported(path, form.name, chosen.which)


def _limits(run: Run, form: GgufArchitecture) -> Iterator[str]:
    """What llama.cpp does differently, although the file says it."""
    context = run.config.model.block_size
    if form.name == "gpt2" and context % _CONTEXT_STEP:
        yield (
            f"llama.cpp aborts beyond the {context:,} tokens of this model's context: it stops at "
            f"multiples of {_CONTEXT_STEP} only"
        )
    if not encodes_alike(run.tokenizer):
        yield (
            "llama.cpp may encode the end of a text differently where it is a line's end and spaces"
        )


def _check_free(path: Path) -> None:
    if path.is_symlink() or path.exists():
        raise AttnlmError(f"{path} exists already", "name a new file, or delete that one first")


def _metadata(
    form: GgufArchitecture, run: Run, checkpoint: Checkpoint, type: str
) -> dict[str, Any]:
    a = run.config.model
    made = "imported into" if run.imported_from else "trained with"
    about = [f"{label}: {value}" for label, value in facts(run, checkpoint)]
    general = {
        "type": "model",
        "name": run.name,
        "description": f"A {a.model} of {run.parameters:,} parameters, {made} attnlm "
        f"{attnlm.__version__}. {'; '.join(about)}",
        "file_type": _FILE_TYPES[type],
        "quantization_version": 2,
    }
    sizes = {**form.metadata(a), "vocab_size": run.vocab_size}
    settings = {} if run.imported_from else {"settings": json.dumps(run.config.settings())}
    return {
        **_below("general", general),
        **_below(form.name, sizes),
        **_below("attnlm", {"version": attnlm.__version__, **settings}),
    }


def _below(prefix: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in keys.items()}


def _write(
    path: Path, form: str, metadata: dict[str, Any], tensors: StoredTensors, type: str
) -> None:
    """One tensor at a time is in memory."""
    from gguf import GGMLQuantizationType, GGUFWriter, quant_shape_to_byte_shape

    types = {name: type_of(name, shape, type) for name, shape in tensors.shapes.items()}
    with files.replacing(path) as file:
        writer = GGUFWriter(file.name, form)
        try:
            for key, value in metadata.items():
                if isinstance(value, str):  # names of folders need not be Unicode
                    value = value.encode(errors="backslashreplace").decode()
                writer.add_key_value(key, value, _value_type(value))
            for name, shape in tensors.shapes.items():
                kind = GGMLQuantizationType[types[name]]
                count = int(np.prod(quant_shape_to_byte_shape(shape, kind)))
                writer.add_tensor_info(name, shape, np.dtype(np.float32), count, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name in tensors.shapes:
                numbers = tensors.tensor(name).contiguous().numpy()
                writer.write_tensor_data(converted(name, numbers, types[name]))
        finally:
            writer.close()
        _check_free(path)


def _value_type(value: object) -> Any:
    from gguf import GGUFValueType

    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    return kinds[value.__class__]
