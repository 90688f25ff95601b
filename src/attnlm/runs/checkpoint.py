"""Checkpoints: weights, optimizer state, and facts (JSON values such as the step).

A checkpoint is one safetensors file. It is written atomically, and checked when loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from attnlm.base import files
from attnlm.base.errors import AttnlmError, NotFiniteError
from attnlm.base.formatting import listed
from attnlm.base.setting_fields import quoted
from attnlm.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

Array = Any
"""A NumPy array or, from a checkpoint of own code, a tensor: NumPy lacks types of buffers."""
_MODEL = "model."
_OPTIMIZER = "optimizer."
_FACTS = "facts"  # the one key of the file's metadata
_HASH = "sha256"
_ZEROS = "0" * 64
"""what stands in the place of the hash of the file while it is computed"""
_BEGINNING = 2**16  # bytes, among which the facts are
_OTHER = "try the run's other checkpoint: `checkpoint` last or best"


# --- Reading --------------------------------------------------------------------------------------


def load_checkpoint(
    path: Path, spec: ModelSpec, vocab_size: int
) -> tuple[Mapping[str, Any], dict[str, Array], dict[str, Array]]:
    """Return a checkpoint's facts, its hash among them, weights and optimizer state, in new memory.

    Raises AttnlmError if the file is missing, damaged or of another model. Raises NotFiniteError if
    weights are NaN or infinite; training never saves such weights.
    """
    buffers: Mapping[str, Any] = {}
    if spec.codes:
        from attnlm.model.own_modules import built_buffers

        buffers = built_buffers(spec, vocab_size)
    forms = {n: _form("float32", shape) for n, shape in spec.parameter_shapes(vocab_size).items()}
    forms |= {name: _form_of(buffer) for name, buffer in buffers.items()}
    with _opened(path, "pt" if buffers else "np") as file:
        facts = json.loads(file.metadata()[_FACTS])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        if facts[_HASH] != _hash(path, str(facts[_HASH])):
            if load_facts(path)[_HASH] != facts[_HASH]:  # training has replaced the file
                return load_checkpoint(path, spec, vocab_size)
            raise ValueError("another hash")
    _check_forms(path, forms, {name: _form_of(tensor) for name, tensor in tensors.items()})
    weights, state = (
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for prefix in (_MODEL, _OPTIMIZER)
    )
    for name in weights.keys() - buffers.keys():  # a mask may have -inf
        # If any number is NaN, so are minimum and maximum.
        ends = (weights[name].min(), weights[name].max()) if 0 not in weights[name].shape else ()
        if not all(map(math.isfinite, ends)):
            raise NotFiniteError
    return facts, weights, state


def load_facts(path: Path) -> dict[str, Any]:
    """Return a checkpoint's facts without reading the tensors, checking the hash or loading torch.

    Raises AttnlmError if the file is missing or damaged.
    """
    with _opened(path, "np") as file:
        facts: dict[str, Any] = json.loads(file.metadata()[_FACTS])
        return facts


@contextlib.contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    """Yield the safetensors file of a checkpoint, and explain errors of reading it."""
    if not path.exists():
        raise AttnlmError(
            f"checkpoint not found: {path}",
            "the run stopped before its first checkpoint; train it again",
        )
    with explaining_read_errors(path, ": it does not match its own hash", _OTHER):
        files.open_regular(path).close()
        with safe_open(path, framework) as file:
            yield file


@contextlib.contextmanager
def explaining_read_errors(path: Path, damaged: str, hint: str) -> Iterator[None]:
    """Turn errors in reading `path` into AttnlmError. If the file is damaged, the message begins
    with "PATH is damaged", followed by the text `damaged`."""
    try:
        yield
    except OSError as error:
        raise AttnlmError(f"cannot read {path}: {error.strerror or error}", hint) from None
    except (ValueError, LookupError, TypeError, RecursionError, SafetensorError):
        raise AttnlmError(f"{path} is damaged{damaged}", hint) from None


def _check_forms(path: Path, forms: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Raise AttnlmError unless all tensors of a file, with the forms `stored`, belong to the model
    or are the optimizer's state of such a tensor, and none of the model is missing."""
    differing = []
    for name, form in stored.items():
        parameter = name.removeprefix(_MODEL)
        if name.startswith(_OPTIMIZER):  # optimizer.<parameter>/<what>
            parameter = name.removeprefix(_OPTIMIZER).rpartition("/")[0]
        shown = quoted(name.removeprefix(_MODEL))[1:-1]
        if parameter not in forms:
            differing.append(f"{shown} is not a tensor of this model")
        elif form != forms[parameter]:
            differing.append(f"{shown} is {form}, not {forms[parameter]}")
    missing = [f"{name} is missing" for name in forms if _MODEL + name not in stored]
    if differing := differing or missing:
        raise AttnlmError(
            f"{path} does not contain the model that config.json describes: {listed(differing, 3)}",
            "undo changes to config.json, or copy the run's folder again from its source",
        )


def _form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {tuple(shape)}"


def _form_of(tensor: Array) -> str:
    return _form(str(tensor.dtype).removeprefix("torch."), tensor.shape)


def _hash(path: Path, written: str) -> str:
    """Return the SHA-256 of a file, in which the hash `written` counts as zeros."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_BEGINNING).replace(written.encode(), _ZEROS.encode(), 1))
        return hashlib.file_digest(file, lambda: digest).hexdigest()


# --- Writing --------------------------------------------------------------------------------------


def save_checkpoint(
    path: Path,
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights by name, `facts` (JSON values) and, if given, the optimizer's state to a file.

    An older file is replaced atomically. The file contains a hash of itself. Equal content gives
    equal bytes. Raises OSError, or AttnlmError for a tensor that no file can hold.
    """
    from safetensors.torch import save_file

    named = {_MODEL + name: tensor for name, tensor in weights.items()}
    named |= {_OPTIMIZER + name: tensor for name, tensor in (optimizer or {}).items()}
    for name, tensor in named.items():
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
            raise AttnlmError(
                f"{name.removeprefix(_MODEL)} is a buffer of {tensor.dtype}, {tensor.layout}, "
                "which a checkpoint cannot hold",
                "keep it dense, or make it in the constructor, with persistent=False",
            )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    content = json.dumps({**facts, _HASH: _ZEROS}, sort_keys=True)
    with files.replacement(path) as temporary:
        try:
            save_file(tensors, temporary, {_FACTS: content})
        except SafetensorError as error:  # which does not say that the disk is full
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error
        with temporary.open("rb+") as file:
            file.seek(file.read(_BEGINNING).index(_ZEROS.encode()))
            file.write(_hash(temporary, _ZEROS).encode())
