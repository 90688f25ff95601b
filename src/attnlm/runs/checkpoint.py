"""Checkpoints: weights, optimizer state, and facts (JSON values such as the step).

They are written atomically, and checked when loaded. A checkpoint is one safetensors file. A run
with the setting `shard` writes a folder instead (see sharded_checkpoint.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.compute.processes import rows_of
from attnlm.model.architecture import Architecture
from attnlm.model.inspection import check_finite, parameter_shapes
from attnlm.model.sizes import LoRA, adapter_shapes
from attnlm.runs.safetensors_file import (
    Header,
    Shape,
    TensorFile,
    explaining_reads,
    read_header,
    write_tensors,
)
from attnlm.runs.sharded_checkpoint import another_model, read_folder, whole_shape

_Value = TypeVar("_Value")

_MODEL, _OPTIMIZER = "model.", "optimizer."
_HEADER_ROOM = 2**16  # bytes, of which 8 are the header's length
_HEADER_BYTES_PER_PARAMETER = 2**10  # name, shape and offsets of weight, mean and square
_BYTES_PER_NUMBER = 12  # a float32 weight with its mean and square


@dataclass(frozen=True)
class CheckpointHeader:
    """The facts of a checkpoint and, if it is a single file, its safetensors header.

    The names, shapes and types of all tensors match the model. Their values have not been read.
    """

    facts: Mapping[str, Any]
    file: Header | None

    @property
    def digest(self) -> str:
        """The digest stored in the file, which `load_checkpoint` checks; "" for a folder."""
        return "" if self.file is None else self.file.metadata.get("digest", "")


def save_checkpoint(
    path: Path,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights by name, `facts` (JSON values) and, if given, the optimizer's state to a file.

    For a model with adapters, `weights` are only the adapters. An older file is replaced
    atomically. The file contains a digest of its content. Equal content gives equal bytes.
    """
    tensors = named_tensors(weights, optimizer or {})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    save_in_turn(path, shapes, lambda name: tensors[name].detach().cpu(), facts)


def save_in_turn(
    path: Path,
    shapes: Mapping[str, Shape],
    tensor: Callable[[str], Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Write a checkpoint, holding one tensor in memory at a time.

    `tensor(name)` returns a tensor in float32 with the shape `shapes[name]`. The names are those of
    `named_tensors`.
    """
    described = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(described.encode())

    def digested(name: str) -> Tensor:
        given = tensor(name)
        _add_to(digest, name, given)
        return given

    write_tensors(
        path, shapes, digested, lambda: {"facts": described, "digest": digest.hexdigest()}
    )


def load_checkpoint(
    path: Path,
    architecture: Architecture,
    vocab_size: int,
    rank: int = 0,
    count: int = 1,
    lora: LoRA | None = None,
    header: CheckpointHeader | None = None,
) -> tuple[Mapping[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's facts, weights and optimizer state.

    If `count` is above 1, return only the rows of each tensor that belong to process `rank` of
    `count` (see `rows_of`). If `lora` is set, the weights are only the adapters. If
    `header` is set, a file's header is not read again, unless the file has been replaced since.

    Raises AttnlmError if the file is missing, damaged or of another model. Raises NotFiniteError if
    weights are NaN or infinite; training never saves such weights.
    """
    found, tensors = _read(path, _shapes(architecture, vocab_size, lora), rank, count, header)
    if path.suffix and count > 1:  # a file is always read and checked whole
        tensors = {n: t[rows_of(len(t), rank, count)].clone() for n, t in tensors.items()}
    weights, state = (
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for prefix in (_MODEL, _OPTIMIZER)
    )
    check_finite(*weights.values())
    return found.facts, weights, state


def named_tensors(weights: Mapping[str, _Value], state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return tensors, or shapes, by their names in a checkpoint: `model.<name>` for weights, and
    `optimizer.<name>` for the optimizer's state."""
    named = {_MODEL + name: tensor for name, tensor in weights.items()}
    return named | {_OPTIMIZER + name: tensor for name, tensor in state.items()}


def load_header(
    path: Path, architecture: Architecture, vocab_size: int, lora: LoRA | None = None
) -> CheckpointHeader:
    """Return a checkpoint's header without reading the tensors or checking the digest.

    Raises AttnlmError if the file is missing or of another model, or if its header is damaged.
    """
    return _read(path, _shapes(architecture, vocab_size, lora), numbers=False)[0]


def _read(
    path: Path,
    shapes: Mapping[str, Shape],
    rank: int = 0,
    count: int = 1,
    header: CheckpointHeader | None = None,
    *,
    numbers: bool = True,
) -> tuple[CheckpointHeader, dict[str, Tensor]]:
    if not path.exists():
        raise AttnlmError(
            f"checkpoint not found: {path}",
            "the run stopped before its first checkpoint; train it again",
        )

    # A folder has several files, and a trainer may replace it between two reads.
    def read() -> tuple[CheckpointHeader, dict[str, Tensor]]:
        hint = "try the run's other checkpoint: `checkpoint` last or best"
        with explaining_reads(path, ": it does not match its own digest", hint):
            if not path.suffix:
                facts, tensors = read_folder(path, shapes, rank, count, numbers)
                return CheckpointHeader(facts, None), tensors
            try:
                return _read_file(path, shapes, header, numbers)
            except ValueError:  # a trainer may have replaced the file after `header`
                if header is None:
                    raise
                return _read_file(path, shapes, None, numbers)

    return files.unless_replaced(path, read)


def _read_file(
    path: Path, shapes: Mapping[str, Shape], header: CheckpointHeader | None, numbers: bool
) -> tuple[CheckpointHeader, dict[str, Tensor]]:
    """Return the header and the tensors, or {} instead of the tensors if `numbers` is False."""
    with files.open_regular(path) as opened:
        if header is None or header.file is None:
            most = _HEADER_ROOM + _HEADER_BYTES_PER_PARAMETER * len(shapes)
            most += _BYTES_PER_NUMBER * sum(map(math.prod, shapes.values()))
            if os.fstat(opened.fileno()).st_size > most:
                raise ValueError("too large")
            found = read_header(opened)
            # All weights of the model, and nothing else but optimizer state.
            fits = (
                tensor.dtype == "F32" and tensor.shape == whole_shape(name, shapes)
                for name, tensor in found.tensors.items()
            )
            if not (shapes.keys() <= found.tensors.keys() and all(fits)):
                raise another_model(path)
            facts = files.json_value(found.metadata.get("facts", ""))
            if not isinstance(facts, dict):
                raise ValueError("no facts")
            header = CheckpointHeader(facts, found)
        assert header.file is not None
        if not numbers:
            return header, {}
        file = TensorFile(opened, header.file)
        tensors = {name: file.read(name) for name in header.file.tensors}
    if header.digest != _digest(header.file.metadata["facts"], tensors):
        raise ValueError("another digest")
    return header, tensors


@functools.lru_cache(maxsize=8)
def _shapes(
    architecture: Architecture, vocab_size: int, lora: LoRA | None = None
) -> Mapping[str, Shape]:
    """Return the shapes of a checkpoint's weights by their names there."""
    if lora is not None:
        return named_tensors(adapter_shapes(architecture, lora), {})
    return named_tensors(parameter_shapes(architecture, vocab_size), {})


def _digest(described: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        _add_to(digest, name, tensors[name])
    return digest.hexdigest()


def _add_to(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
