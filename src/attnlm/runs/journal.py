"""The files metrics.jsonl and ticker.jsonl of a run: a line with a checksum for each evaluation.

ticker.jsonl has snapshots of the model: a sampled text, and "maps", which are attention weights
over a short passage of text. Axes of maps: L layers, H heads, T tokens of the passage.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.records import decoded, limited
from attnlm.model.architecture import Architecture

Record = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """A file of records, one per line, in ascending order of `step`."""

    path: Path
    record: type
    """the dataclass that each line is validated against"""
    hint: str
    """what to do about a damaged file"""
    largest: int
    """the maximum size of the file, in bytes"""

    def records(self) -> list[Record]:
        """Return all records, oldest first. A last line that a crash truncated is left out.

        Raises AttnlmError if the file is damaged or can't be read.
        """
        if not self.path.exists():
            return []
        *lines, _ = files.read_bytes(self.path, self.largest).split(b"\n")
        records: list[Record] = []
        for line in lines:
            try:
                record = files.json_value(line.decode())
                intact = isinstance(record, dict) and record.pop("crc32", None) == _checksum(record)
            except (ValueError, RecursionError):
                intact = False
            if not intact:
                raise self.damaged()
            decoded(self.record, record, self.path, self.hint)
            if records and record["step"] <= records[-1]["step"]:
                raise self.damaged()
            records.append(record)
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and flush it to disk, unless the file would exceed its maximum size."""
        line = _line(record)
        if self.size() + len(line) > self.largest:
            return
        with files.naming(self.path), files.open_regular(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def size(self) -> int:
        """Return the file's size in bytes, or 0 if the file does not exist."""
        return self.path.stat().st_size if self.path.exists() else 0

    def replace(self, records: list[Record]) -> None:
        """Replace all records with `records`."""
        files.write_bytes(self.path, b"".join(map(_line, records)))

    def damaged(self) -> AttnlmError:
        """Return the error for a damaged file."""
        return AttnlmError(f"{self.path} is damaged, or was not written by attnlm", self.hint)


def _line(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record, with a checksum that detects any changed bit."""
    return (json.dumps({**record, "crc32": _checksum(record)}) + "\n").encode()


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())


# --- Snapshots ------------------------------------------------------------------------------------

PASSAGE = 24
"""the maximum number of tokens in the passage"""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a run's model at one evaluation."""

    step: int
    text: str
    """sampled with the same prompt and seed at every evaluation"""
    maps: NDArray[np.float32] | None
    """(L, H, T, T): the attention weights of all heads over the passage, stored in steps of 1/255;
    row t has the weights of token t on tokens 0 to t; None for a model without heads (bigram), or
    whose heads do not record their weights"""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of ticker.jsonl."""

    step: int = limited(at_least=0)
    text: str
    maps: str | None
    passage: tuple[str, ...] = ()
    """the tokens of the passage; only the first line of the file has them"""

    def __post_init__(self) -> None:
        "".join((self.text, *self.passage)).encode()  # refuse lone surrogates


def ticker_journal(folder: Path) -> Journal:
    """Return the journal ticker.jsonl of the run in `folder`."""
    hint = "remove it: the run does not need it, and will write a new one"
    return Journal(folder / "ticker.jsonl", _Line, hint, largest=2**25)


def snapshot_record(snapshot: Snapshot) -> Record:
    """Return a snapshot as JSON values."""
    maps_LHTT, packed = snapshot.maps, None
    if maps_LHTT is not None:
        rows, columns = np.tril_indices(maps_LHTT.shape[-1])
        weights = np.rint(255 * np.nan_to_num(maps_LHTT[..., rows, columns]))
        packed = base64.b64encode(weights.astype(np.uint8).tobytes()).decode()
    return {"step": snapshot.step, "text": snapshot.text, "maps": packed}


def snapshot_of(record: Record, architecture: Architecture) -> Snapshot:
    """Return the snapshot of a record. Raises ValueError if the maps do not fit the model."""
    packed, layers, heads = record["maps"], architecture.layers, architecture.maps_per_layer
    if packed is not None and heads == 0:
        raise ValueError("it has maps, but the model has no heads")
    if packed is None:
        return Snapshot(record["step"], record["text"], None)
    weights = np.frombuffer(base64.b64decode(packed, validate=True), np.uint8)
    count = len(weights) // (layers * heads)
    length = (math.isqrt(8 * count + 1) - 1) // 2
    if not 0 < length <= PASSAGE or len(weights) != layers * heads * length * (length + 1) // 2:
        raise ValueError("its maps do not fit the model")
    maps_LHTT = np.zeros((layers, heads, length, length), np.float32)
    rows, columns = np.tril_indices(length)
    maps_LHTT[..., rows, columns] = weights.reshape(layers, heads, -1) / np.float32(255)
    return Snapshot(record["step"], record["text"], maps_LHTT)
