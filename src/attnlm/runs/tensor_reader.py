"""safetensors files, read one tensor at a time.

The library maps a file: what was read of it counts as memory beside what is made of it, until the
file is closed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Stored(NamedTuple):
    """A tensor in a file: its type as safetensors names it, its shape, and its bytes' place."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file, of which only the header was read.

    `tensors` are what it has, `metadata` the texts that it keeps beside them. Raises ValueError or
    RecursionError where it is no such file, with a header of at most so many bytes.
    """

    def __init__(self, file: IO[bytes], largest_header: int) -> None:
        self._file = file
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(largest_header, size - 8):
            raise ValueError("too large a header")
        header = json.loads(file.read(length).decode(), object_pairs_hook=_distinct)
        if not isinstance(header, dict):
            raise ValueError("no header")
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not _are_all(str, self.metadata.values()):
            raise ValueError("no texts")
        self.tensors = {name: _stored(about) for name, about in header.items()}
        self._begin, end = 8 + length, 0
        for stored in sorted(self.tensors.values(), key=lambda stored: (stored.begin, stored.end)):
            if stored.begin != end:
                raise ValueError("tensors overlap, or bytes belong to none")
            end = stored.end
        if self._begin + end != size:
            raise ValueError("not as long as its tensors")

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows, in new memory. Raises OSError, and ValueError where the
        file became shorter."""
        stored = self.tensors[name]
        shape, begin = stored.shape, stored.begin
        if rows is not None:
            begin += (stored.end - begin) // shape[0] * rows.start
            shape = (rows.stop - rows.start, *shape[1:])
        tensor = torch.empty(shape, dtype=_TYPES[stored.dtype])
        memory = tensor.flatten().view(torch.uint8).numpy().data
        self._file.seek(self._begin + begin)
        if self._file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise ValueError("it became shorter")
        return tensor


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(content := dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return content


def _stored(about: Mapping[str, Any]) -> Stored:
    try:
        dtype, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    except (KeyError, TypeError):
        raise ValueError("not a tensor") from None
    if type(dtype) is not str or not isinstance(shape, list):
        raise ValueError("not a tensor")
    if not _are_all(int, (*shape, begin, end)) or min(0, begin, end - begin, *shape) < 0:
        raise ValueError("no sizes")
    if dtype in _TYPES and end - begin != math.prod(shape) * _TYPES[dtype].itemsize:
        raise ValueError("a shape of another size")
    return Stored(dtype, tuple(shape), begin, end)


def _are_all(kind: type, values: Any) -> bool:
    return all(type(value) is kind for value in values)
