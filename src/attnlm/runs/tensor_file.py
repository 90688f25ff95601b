"""safetensors files, written one tensor at a time: the library would hold all of them twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlm.base import files

Shape = tuple[int, ...]


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    """A file's header with its length before it, padded so that the tensors are aligned."""
    content = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def write_in_turn(
    path: Path,
    shapes: Mapping[str, Shape],
    tensor: Callable[[str], Tensor],
    metadata: Callable[[], Mapping[str, str]],
) -> None:
    """Writes tensors in float32, in the order of their names; the file is whole or absent.

    `tensor` gives that of a name. `metadata` is called when all have been written, and once before,
    for its length: it may hold a digest of them.
    """
    names, header, end = sorted(shapes), {}, 0
    for name in names:
        begin, end = end, end + 4 * math.prod(shapes[name])
        header[name] = {"data_offsets": [begin, end], "dtype": "F32", "shape": shapes[name]}
    with files.replacing(path) as file:
        file.write(_header_bytes({**header, "__metadata__": metadata()}))
        for name in names:
            given = tensor(name).contiguous()
            assert given.dtype == torch.float32 and given.shape == shapes[name], name
            file.write(given.flatten().view(torch.uint8).numpy().data)
        file.seek(0)
        file.write(_header_bytes({**header, "__metadata__": metadata()}))
