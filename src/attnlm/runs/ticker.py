"""The lines of ticker.jsonl: a snapshot of the model at each evaluation.

Axes: L layers, H heads, T tokens of a short passage.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnlm.base.records import limited
from attnlm.model.architecture import Architecture
from attnlm.runs.json_lines import Journal, Record

PASSAGE = 24
"""the maximum number of tokens in the passage that the maps show"""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a run's model at one evaluation."""

    step: int
    text: str
    """sampled with the same prompt and seed at every evaluation"""
    maps: NDArray[np.float32] | None
    """(L, H, T, T), in steps of 1/255: all heads' attention weights over the run's passage; row t
    has the weights of token t on the tokens up to itself; None for a bigram"""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of ticker.jsonl."""

    step: int = limited(at_least=0)
    text: str
    maps: str | None
    passage: tuple[str, ...] = ()
    """the tokens that the maps show; only in the first line"""

    def __post_init__(self) -> None:
        "".join((self.text, *self.passage)).encode()  # refuse lone surrogates


def ticker_journal(folder: Path) -> Journal:
    """Return the ticker of the run in `folder`."""
    hint = "remove it: the run does not need it, and writes a new one"
    return Journal(folder / "ticker.jsonl", _Line, hint, largest=2**25)


def snapshot_record(snapshot: Snapshot) -> Record:
    """Return a snapshot as JSON values."""
    maps = None if snapshot.maps is None else _packed(snapshot.maps)
    return {"step": snapshot.step, "text": snapshot.text, "maps": maps}


def snapshot_of(record: Record, architecture: Architecture) -> Snapshot:
    """Return the snapshot of a record. Raises ValueError if it does not fit the model."""
    maps = record["maps"]
    if (maps is None) != (architecture.maps_per_layer == 0):
        raise ValueError("maps where there are no heads, or none where there are")
    if maps is not None:
        maps = _unpacked(maps, architecture.layers, architecture.maps_per_layer)
    return Snapshot(record["step"], record["text"], maps)


def _packed(maps_LHTT: NDArray[np.float32]) -> str:
    rows, columns = np.tril_indices(maps_LHTT.shape[-1])
    weights = np.rint(255 * np.nan_to_num(maps_LHTT[..., rows, columns]))
    return base64.b64encode(weights.astype(np.uint8).tobytes()).decode()


def _unpacked(packed: str, layers: int, heads: int) -> NDArray[np.float32]:
    weights = np.frombuffer(base64.b64decode(packed, validate=True), np.uint8)
    count = len(weights) // (layers * heads)
    length = (math.isqrt(8 * count + 1) - 1) // 2
    if not 0 < length <= PASSAGE or len(weights) != layers * heads * length * (length + 1) // 2:
        raise ValueError("no maps of such a model")
    maps_LHTT = np.zeros((layers, heads, length, length), np.float32)
    rows, columns = np.tril_indices(length)
    maps_LHTT[..., rows, columns] = weights.reshape(layers, heads, -1) / np.float32(255)
    return maps_LHTT
