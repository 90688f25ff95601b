"""Checkpoints: weights, optimizer state, and facts (JSON values such as the step).

A checkpoint is one safetensors file. It is written atomically, and checked when loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlm.base.errors import AttnlmError
from attnlm.base.files import open_regular
from attnlm.base.formatting import listed
from attnlm.base.setting_fields import quoted
from attnlm.model.spec import ModelSpec
from attnlm.runs.safetensors_file import (
    LACKING,
    NAMES,
    TORCH_TYPES,
    Array,
    Shape,
    StoredTensor,
    TensorFile,
    check_finite,
    explaining_read_errors,
    write_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

_MODEL = "model."
_OPTIMIZER = "optimizer."


# --- Reading --------------------------------------------------------------------------------------


def load_checkpoint(
    path: Path, spec: ModelSpec, vocab_size: int
) -> tuple[Mapping[str, Any], dict[str, Array], dict[str, Array]]:
    """Return a checkpoint's facts, weights and optimizer state, in new memory.

    Buffers of a type that NumPy lacks are integers with the same bits.

    Raises AttnlmError if the file is missing, damaged or of another model. Raises NotFiniteError if
    weights are NaN or infinite; training never saves such weights.
    """
    buffers = spec.buffers(vocab_size)
    facts, tensors = _read_checkpoint(path, _stored_forms(spec, vocab_size, buffers))
    weights, state = (
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for prefix in (_MODEL, _OPTIMIZER)
    )
    parameters = weights.keys() - buffers.keys()  # a mask may have -inf
    check_finite(*(weights[name] for name in parameters))
    return facts, weights, state


def load_facts(path: Path, spec: ModelSpec, vocab_size: int) -> Mapping[str, Any]:
    """Return a checkpoint's facts without reading the tensors or checking the digest."""
    forms = _stored_forms(spec, vocab_size, spec.buffers(vocab_size))
    return _read_checkpoint(path, forms, with_tensors=False)[0]


_Form = tuple[Shape, str]
"""The shape of a stored tensor, and its safetensors type."""


def _stored_forms(
    spec: ModelSpec, vocab_size: int, buffers: Mapping[str, Tensor]
) -> Mapping[str, _Form]:
    """Return the form of each parameter and buffer in a checkpoint."""
    parameters = {n: (shape, "F32") for n, shape in spec.parameter_shapes(vocab_size).items()}
    return parameters | {n: (tuple(b.shape), NAMES[str(b.dtype)]) for n, b in buffers.items()}


def _read_checkpoint(
    path: Path, forms: Mapping[str, _Form], *, with_tensors: bool = True
) -> tuple[Mapping[str, Any], dict[str, Array]]:
    """Return a checkpoint's facts and tensors.

    If `with_tensors` is False, return no tensors, and do not check the digest.
    """
    if not path.exists():
        raise AttnlmError(
            f"checkpoint not found: {path}",
            "the run stopped before its first checkpoint; train it again",
        )

    hint = "try the run's other checkpoint: `checkpoint` last or best"
    with (
        explaining_read_errors(path, ": it does not match its own digest", hint),
        open_regular(path) as opened,
    ):
        file = TensorFile.of(opened)
        stored = file.tensors
        metadata = file.metadata
        _check_forms(path, forms, stored)
        _refuse(path, [f"{name} is missing" for name in forms if _MODEL + name not in stored])
        facts = json.loads(metadata["facts"])
        if not with_tensors:
            return facts, {}
        tensors = {name: file.read(name) for name in stored}
        types = {name: tensor.dtype for name, tensor in stored.items()}
        if metadata["digest"] != _content_digest(metadata["facts"], tensors, types):
            raise ValueError("another digest")
    return facts, tensors


def _check_forms(
    path: Path, forms: Mapping[str, _Form], stored: Mapping[str, StoredTensor]
) -> None:
    """Raise AttnlmError, which names tensors, unless all tensors of a file belong to the model.

    The tensors must have these forms, or be the optimizer's state of such.
    """
    differing = []
    for name, tensor in stored.items():
        parameter = name.removeprefix(_MODEL)
        if name.startswith(_OPTIMIZER):  # optimizer.<parameter>/<what>
            parameter = name.removeprefix(_OPTIMIZER).rpartition("/")[0]
        shape, dtype = forms.get(parameter, (None, ""))
        shown = quoted(name.removeprefix(_MODEL))[1:-1]
        if shape is None:
            differing.append(f"{shown} is not a tensor of this model")
        elif tensor.shape != shape:
            differing.append(f"{shown} has the shape {tensor.shape}, not {shape}")
        elif tensor.dtype != dtype:
            differing.append(f"{shown} has the type {tensor.dtype}, not {dtype}")
    _refuse(path, differing)


def _refuse(path: Path, differing: Sequence[str]) -> None:
    if differing:
        raise AttnlmError(
            f"{path} does not contain the model that config.json describes: {listed(differing, 3)}",
            "undo changes to config.json, or copy the run's folder again from its source",
        )


def _content_digest(facts_json: str, tensors: Mapping[str, Array], types: Mapping[str, str]) -> str:
    digest = hashlib.sha256(facts_json.encode())
    for name in sorted(tensors):
        _add_tensor(digest, name, tensors[name], types[name])
    return digest.hexdigest()


def _add_tensor(digest: hashlib._Hash, name: str, tensor: Array, dtype: str) -> None:
    digest.update(f"\n{name} {TORCH_TYPES[dtype]} {tensor.shape}\n".encode())
    digest.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


# --- Writing --------------------------------------------------------------------------------------


def save_checkpoint(
    path: Path,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights by name, `facts` (JSON values) and, if given, the optimizer's state to a file.

    An older file is replaced atomically. The file contains a digest of its content. Equal content
    gives equal bytes.
    """
    tensors = {_MODEL + name: tensor for name, tensor in weights.items()}
    tensors |= {_OPTIMIZER + name: tensor for name, tensor in (optimizer or {}).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in NAMES or str(tensor.layout) != "torch.strided":
            raise AttnlmError(
                f"{name.removeprefix(_MODEL)} is a buffer of {tensor.dtype}, {tensor.layout}, "
                "which a checkpoint cannot hold",
                "use a dense buffer of numbers of another type",
            )
    types = {name: NAMES[str(tensor.dtype)] for name, tensor in tensors.items()}

    def read(name: str) -> Array:
        tensor = tensors[name].detach().cpu()
        if types[name] in LACKING:
            import torch

            tensor = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)
            return tensor.numpy().view(LACKING[types[name]])
        array: Array = tensor.numpy()
        return array

    facts_json = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(facts_json.encode())

    def read_and_digest(name: str) -> Array:
        values = read(name)
        _add_tensor(digest, name, values, types[name])
        return values

    write_tensors(
        path,
        shapes,
        read_and_digest,
        lambda: {"facts": facts_json, "digest": digest.hexdigest()},
        types,
    )
