"""Tensors and what they belong to: complete or absent, checked on load.

One safetensors file; a sharded run's are a folder of them (sharded_checkpoint.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.rows import rows_of
from attnlm.model.architecture import Architecture
from attnlm.model.inspection import check_finite, parameter_shapes
from attnlm.model.low_rank import LoRA, adapter_shapes
from attnlm.runs.older_files import from_older, older_shapes
from attnlm.runs.sharded_checkpoint import read_folder, whole_shape
from attnlm.runs.tensor_file import Shape, write_in_turn
from attnlm.runs.tensor_reader import Stored, TensorFile

_MODEL, _OPTIMIZER = "model.", "optimizer."
_HEADER_ROOM, _LARGEST_HEADER = 2**16, 2**26  # bytes
_HEADER_BYTES_PER_PARAMETER = 2**10  # itself, mean and square: each a name, a shape and a place
_BYTES_PER_NUMBER = 12  # in float32, with mean and square


def save_checkpoint(
    path: Path,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes weights by their names, `facts` (JSON values) and, if given, the optimizer's state.

    Of a model with adapters the weights are theirs: what is frozen lies elsewhere (weights.py).
    The file replaces an older one in one step, and the same content is the same bytes. A digest of
    all that it holds is part of it.
    """
    tensors = named_tensors(weights, optimizer or {})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _save_in_turn(path, shapes, lambda name: tensors[name].detach().cpu(), facts)


def save_weights_in_turn(
    path: Path,
    shapes: Mapping[str, Shape],
    weight: Callable[[str], Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Writes a checkpoint of weights of which only one at a time is in memory.

    `weight` gives that of a name, in float32 and of its shape.
    """
    _save_in_turn(path, _named(shapes), lambda name: weight(name.removeprefix(_MODEL)), facts)


def _save_in_turn(
    path: Path,
    shapes: Mapping[str, Shape],
    tensor: Callable[[str], Tensor],
    facts: Mapping[str, Any],
) -> None:
    described = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(described.encode())

    def digested(name: str) -> Tensor:
        given = tensor(name)
        _add_to(digest, name, given)
        return given

    def metadata() -> dict[str, str]:
        return {"facts": described, "digest": digest.hexdigest()}

    write_in_turn(path, shapes, digested, metadata)


def load_checkpoint(
    path: Path,
    architecture: Architecture,
    vocab_size: int,
    rank: int = 0,
    count: int = 1,
    lora: LoRA | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's facts, weights and optimizer's state: of all tensors, where `count` processes
    share them out, the rows of one (`rows_of`). With `lora` the weights are those of adapters.

    Raises AttnlmError when the file is missing, damaged, or holds another model, and NotFiniteError
    for weights that are NaN or infinite, which training never saves. Names, shapes and types of all
    tensors are compared before any is read.
    """
    shapes = _shapes(architecture, vocab_size, lora)
    facts, tensors = _read(path, shapes, rank, count)
    weights, state = (_below(prefix, tensors) for prefix in (_MODEL, _OPTIMIZER))
    if not shapes.keys() <= weights.keys():
        weights, state = from_older(weights, shapes), from_older(state, shapes)
    if path.suffix and count > 1:  # a file is read, and checked, as a whole
        weights, state = (_rows(tensors, rank, count) for tensors in (weights, state))
    check_finite(*weights.values())
    return facts, weights, state


def _rows(tensors: Mapping[str, Tensor], rank: int, count: int) -> dict[str, Tensor]:
    return {name: t[rows_of(len(t), rank, count)].clone() for name, t in tensors.items()}


def named_tensors(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and an optimizer's state by their names in a checkpoint."""
    named = {_MODEL + name: tensor for name, tensor in weights.items()}
    return named | {_OPTIMIZER + name: tensor for name, tensor in state.items()}


def load_facts(
    path: Path, architecture: Architecture, vocab_size: int, lora: LoRA | None = None
) -> dict[str, Any]:
    """The facts alone, at once: the numbers are not read, and the digest is not checked.

    Raises AttnlmError as `load_checkpoint` does.
    """
    return _read(path, _shapes(architecture, vocab_size, lora), numbers=False)[0]


def _read(
    path: Path,
    shapes: Mapping[str, Shape],
    rank: int = 0,
    count: int = 1,
    *,
    numbers: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.exists():
        raise AttnlmError(
            f"there is no checkpoint {path}",
            "the run stopped before it was written; train it again",
        )

    # A folder has several files, and a trainer may replace it in between.
    def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
        with _explaining(path):
            if path.suffix:
                found = _read_file(path, shapes, numbers)
            else:
                found = read_folder(path, _named(shapes), rank, count, numbers)
        if found is None:
            raise AttnlmError(
                f"{path} does not hold the model that its run describes",
                "copy the run's folder again from where it came",
            )
        return found

    return files.unless_replaced(path, read)


def stated_digest(path: Path) -> str:
    """The digest that a checkpoint's file states of all that it holds; reading it checks that it
    is right. Raises as `load_facts` does."""
    with _explaining(path), files.open_regular(path) as opened:
        return TensorFile(opened, _LARGEST_HEADER).metadata.get("digest", "")


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a checkpoint is read into AttnlmError."""
    try:
        yield
    except OSError as error:
        raise AttnlmError(
            f"can't read {path}: {error.strerror or error}", "check that it may be read"
        ) from None
    except (ValueError, RecursionError):
        raise _damaged(path) from None


def _read_file(
    path: Path, shapes: Mapping[str, Shape], numbers: bool
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """None where it is another model's."""
    tensors = {}
    with files.open_regular(path) as opened:
        most = _HEADER_ROOM + _HEADER_BYTES_PER_PARAMETER * len(shapes)
        count = sum(map(math.prod, shapes.values()))
        if os.fstat(opened.fileno()).st_size > 8 + most + _BYTES_PER_NUMBER * count:
            raise ValueError("too large")
        file = TensorFile(opened, most)
        layouts = shapes, older_shapes(shapes)
        if not any(_are_of_model(file.tensors, _named(layout)) for layout in layouts):
            return None
        described = file.metadata.get("facts", "")
        digest = hashlib.sha256(described.encode())
        for name in sorted(file.tensors) if numbers else ():
            tensors[name] = file.read(name)
            _add_to(digest, name, tensors[name])
    if numbers and file.metadata.get("digest") != digest.hexdigest():
        raise ValueError("another digest")
    facts = files.json_value(described)
    if not isinstance(facts, dict):
        raise ValueError("no facts")
    return facts, tensors


def _shapes(
    architecture: Architecture, vocab_size: int, lora: LoRA | None = None
) -> dict[str, Shape]:
    if lora is not None:
        return dict(adapter_shapes(architecture, lora))
    return parameter_shapes(architecture, vocab_size)


def _named(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {_MODEL + name: shape for name, shape in shapes.items()}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _are_of_model(tensors: Mapping[str, Stored], expected: Mapping[str, Shape]) -> bool:
    """Whether these are all of the model's tensors and nothing else but what an optimizer keeps."""
    for name, found in tensors.items():
        if found.dtype != "F32" or found.shape != whole_shape(name, expected):
            return False
    return expected.keys() <= tensors.keys()


def _digest(described: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        _add_to(digest, name, tensors[name])
    return digest.hexdigest()


def _add_to(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _damaged(path: Path) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged: it does not match its own digest",
        "the run's other checkpoint may be intact: try `checkpoint` last or best",
    )
