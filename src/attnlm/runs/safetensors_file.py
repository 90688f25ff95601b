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

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attnlm.base import files
from attnlm.base.errors import AttnlmError

Shape = tuple[int, ...]
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {
    "F64": "float64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_TYPES = {**FLOATS, **{name: getattr(torch, dtype) for name, dtype in _OTHERS.items()}}
NAMES = {dtype: name for name, dtype in _TYPES.items()}
"""the name of each type in a file"""


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

    def read(self, name: str) -> Tensor:
        """Return a tensor in new memory.

        Raises OSError if reading fails, ValueError if the file was truncated.
        """
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=_TYPES[stored.dtype])
        memory = tensor.flatten().view(torch.uint8).numpy().data
        self.file.seek(self.begin + stored.begin)
        if self.file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise ValueError("it became shorter")
        return tensor


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
    tensor: Callable[[str], Tensor],
    metadata: Callable[[], Mapping[str, str]] = lambda: {"format": "pt"},
    types: Mapping[str, str] = {},
) -> None:
    """Write tensors, sorted by name, to a file atomically.

    `tensor(name)` returns a tensor, in float32 unless `types` names another type. `metadata` is
    called twice: before the first tensor, to reserve space for its result, and after the last
    tensor, since the result may contain a digest of the tensors. Both results must have the same
    length.
    """
    names = sorted(shapes)
    header = {}
    begin = 0
    for name in names:
        dtype = types.get(name, "F32")
        end = begin + _TYPES[dtype].itemsize * math.prod(shapes[name])
        header[name] = {"data_offsets": [begin, end], "dtype": dtype, "shape": shapes[name]}
        begin = end
    with files.open_replacement(path) as file:
        file.write(_encode_header({**header, "__metadata__": metadata()}))
        for name in names:
            values = tensor(name).contiguous()
            assert NAMES[values.dtype] == header[name]["dtype"], name
            assert values.shape == shapes[name], name
            file.write(values.flatten().view(torch.uint8).numpy().data)
        file.seek(0)
        file.write(_encode_header({**header, "__metadata__": metadata()}))


def _encode_header(header: Mapping[str, Any]) -> bytes:
    """Return a header preceded by its length, padded so that the tensors are aligned."""
    content = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content
