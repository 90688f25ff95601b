"""Ids in files: mapped to memory, and several of them read as one array."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError

MOST_SHARDS = 2**16  # of a split
Ids: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32]


def map_ids(file: IO[bytes], dtype: np.dtype[Any], tokens: int) -> Ids:
    """Map a file of ids to memory, and note its size and time for `check_unchanged`."""
    ids: np.memmap[Any, Any] = np.memmap(file, dtype, mode="r", shape=(tokens,))
    vars(ids)["opened"] = os.fstat(file.fileno())
    return ids


def check_unchanged(ids: Ids | Shards) -> None:
    """Raise AttnlmError if a mapped file was written to since: a shorter one kills its reader.

    If another file is at its path by now, or none, the mapped one is as it was.
    """
    for part in ids.mapped if isinstance(ids, Shards) else (ids,):
        if not isinstance(part, np.memmap) or (before := vars(part).get("opened")) is None:
            continue
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            now = Path(str(part.filename)).stat()
            same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
            if not same and os.path.samestat(now, before):
                raise AttnlmError(
                    f"{part.filename} was written to while it was in use",
                    "prepare or copy the data set again; a run that it was for can be resumed then",
                )


class Shards:
    """A read-only array of ids, shape (tokens,), whose parts are mapped to memory.

    All `parts` but the last have the same length. Slices and arrays of places give plain arrays.
    """

    def __init__(self, parts: Sequence[Ids]) -> None:
        self.mapped = tuple(parts)
        # As plain arrays, since indexing a np.memmap runs a method of its own each time.
        self.parts: tuple[Ids, ...] = tuple(part.view(np.ndarray) for part in parts)
        self.shape = (sum(map(len, parts)),)
        self.dtype: np.dtype[Any] = parts[0].dtype
        self.nbytes = len(self) * self.dtype.itemsize
        self._size = len(parts[0])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: int | slice | NDArray[Any]) -> Any:
        if isinstance(places, np.ndarray):
            return self._at(places)
        if not isinstance(places, slice):
            return self._at(np.array(range(len(self))[places]))[()]
        start, stop, step = places.indices(len(self))
        if step != 1:
            return self._at(np.arange(start, stop, step))
        return self._between(start, max(start, stop))

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("several files can't be one array without a copy")
        return np.concatenate(self.parts).astype(dtype or self.dtype, copy=False)

    def _between(self, start: int, stop: int) -> NDArray[Any]:
        first, last = start // self._size, max(start, stop - 1) // self._size
        ids = [
            part[max(0, start - i * self._size) : max(0, stop - i * self._size)]
            for i, part in enumerate(self.parts[first : last + 1], first)
        ]
        return ids[0] if len(ids) == 1 else np.concatenate(ids or [self.parts[0][:0]])

    def _at(self, places: NDArray[Any]) -> NDArray[Any]:
        """The ids at places ≥ 0. Most rows of `places` are windows, and lie in one part."""
        if not places.size:
            return np.empty(places.shape, self.dtype)
        rows = places.reshape(-1, places.shape[-1] if places.ndim else 1)
        ids = np.empty(rows.shape, self.dtype)
        part, last = rows.min(axis=1) // self._size, rows.max(axis=1) // self._size
        for row in np.flatnonzero(part != last):  # those that reach over an end
            for i in range(part[row], last[row] + 1):
                here = rows[row] // self._size == i
                ids[row, here] = self.parts[i][rows[row, here] - i * self._size]
            part[row] = len(self.parts)
        order = part.argsort(kind="stable")
        ends = np.searchsorted(part[order], np.arange(len(self.parts) + 1))
        for i in np.flatnonzero(np.diff(ends)).tolist():
            chosen = order[ends[i] : ends[i + 1]]
            ids[chosen] = self.parts[i][rows[chosen] - i * self._size]
        return ids.reshape(places.shape)


def file_name(split: str, number: int | None = None) -> str:
    """train.bin, or train-00007.bin where a split is in several files."""
    return f"{split}.bin" if number is None else f"{split}-{number:05}.bin"
