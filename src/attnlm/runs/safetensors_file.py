"""Read and write safetensors files one tensor at a time.

The safetensors library, which checks the headers, would need more memory. To write a file, it holds
all tensors in memory. To read tensors, it maps the file, and the system counts the parts that were
read as used memory.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from attnlm.base import files
from attnlm.base.errors import AttnlmError, NotFiniteError

Shape = tuple[int, ...]
Array = NDArray[Any]
_TYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
TORCH_TYPES = {name: f"torch.{dtype}" for name, dtype in _TYPES.items()}
NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}
"""the name of each type of PyTorch in a file"""
LACKING = {"BF16": "uint16", "F8_E5M2": "uint8", "F8_E4M3": "uint8"}
_NUMPY_TYPES = {name: np.dtype(LACKING.get(name, dtype)) for name, dtype in _TYPES.items()}
"""NumPy's types, or the bits as integers where NumPy lacks one"""


class StoredTensor(NamedTuple):
    """A tensor in a file: safetensors type, shape, and byte offsets from the end of the header."""

    dtype: str
    shape: Shape
    begin: int
    end: int


class TensorFile(NamedTuple):
    """An open safetensors file, with descriptions of its tensors and its metadata."""

    file: IO[bytes]
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    begin: int
    """the byte where the first tensor begins"""

    @classmethod
    def of(cls, file: IO[bytes]) -> TensorFile:
        """Read the header of an open file.

        Raises SafetensorError if it is not a safetensors file: if its header is invalid or exceeds
        100 MB, if tensors overlap, or if bytes belong to no tensor.
        """
        length = int.from_bytes(file.read(8), "little")
        with safe_open(file.name, "np"):  # checks all else, and reads no tensor
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", None) or {}
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
        }
        return cls(file, tensors, metadata, 8 + length)

    def read(self, name: str) -> Array:
        """Return a tensor in new memory; its bits as integers if NumPy lacks its type.

        Raises OSError if reading fails, ValueError if the file was truncated.
        """
        stored = self.tensors[name]
        array: Array = np.empty(stored.shape, _NUMPY_TYPES[stored.dtype])
        content = array.reshape(-1).view(np.uint8)
        self.file.seek(self.begin + stored.begin)
        if self.file.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise ValueError("it became shorter")
        return array


def check_finite(*arrays: Array) -> None:
    """Raise NotFiniteError if weights contain NaN or infinity."""
    for array in arrays:
        # If any number is NaN, so are minimum and maximum. A mask of all numbers would take memory.
        if array.size and not np.isfinite((array.min(), array.max())).all():
            raise NotFiniteError


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


def write_tensors(
    path: Path,
    shapes: Mapping[str, Shape],
    tensor: Callable[[str], Array],
    metadata: Callable[[], Mapping[str, str]],
    types: Mapping[str, str],
) -> None:
    """Write tensors, sorted by name, to a file atomically.

    `tensor(name)` returns an array of the type that `types` names. `metadata` is called twice:
    before the first tensor, to reserve space for its result, and after the last tensor, since the
    result may contain a digest of the tensors. Both results must have the same length.
    """
    names = sorted(shapes)
    header = {}
    begin = 0
    for name in names:
        dtype = types[name]
        end = begin + _NUMPY_TYPES[dtype].itemsize * math.prod(shapes[name])
        header[name] = {"data_offsets": [begin, end], "dtype": dtype, "shape": shapes[name]}
        begin = end
    with files.open_replacement(path) as file:
        file.write(_encode_header({**header, "__metadata__": metadata()}))
        for name in names:
            values = np.ascontiguousarray(tensor(name)).reshape(shapes[name])
            assert values.dtype == _NUMPY_TYPES[types[name]], name
            file.write(values.reshape(-1).view(np.uint8).data)
        file.seek(0)
        file.write(_encode_header({**header, "__metadata__": metadata()}))


def _encode_header(header: Mapping[str, Any]) -> bytes:
    """Return a header preceded by its length, padded so that the tensors are aligned."""
    content = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content
