"""The files metrics.jsonl and ticker.jsonl of a run: a line of JSON for each evaluation.

ticker.jsonl has snapshots of the model, also at EARLY_STEPS: a sampled text, the scores of all
heads, and "maps", which are attention weights over a short passage of text. Axes of maps: L layers,
H heads, T tokens of the passage.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import limited, record_from_json

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Journal(Generic[_Record]):
    """A file of records, one per line, oldest first."""

    path: Path
    record: type[_Record]
    """a dataclass; a line leaves out the fields that have their default"""
    hint: str
    """what to do about a damaged file"""

    def records(self) -> list[_Record]:
        """Return all records, oldest first, without a last line that a crash truncated."""
        if not self.path.exists():
            return []
        *lines, _ = files.read_bytes(self.path).split(b"\n")
        try:
            values = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise self.damaged_error() from None
        return [record_from_json(self.record, value, self.path, self.hint) for value in values]

    def append(self, *records: _Record) -> None:
        """Append records and flush them to disk."""
        files.append_bytes(self.path, b"".join(map(_to_line, records)))

    def size(self) -> int:
        """Return the file's size in bytes, or 0 if the file does not exist."""
        return self.path.stat().st_size if self.path.exists() else 0

    def replace(self, records: Iterable[_Record]) -> None:
        """Replace all records with `records`."""
        files.write_bytes(self.path, b"".join(map(_to_line, records)))

    def damaged_error(self) -> AttnlmError:
        """Return the error for a damaged file."""
        return AttnlmError(f"{self.path} is damaged, or was not written by attnlm", self.hint)


def _to_line(record: Any) -> bytes:
    """Return the line of a record, without the fields that have their default."""
    record_fields = fields(record)
    values = {field.name: getattr(record, field.name) for field in record_fields}
    non_default = {f.name: values[f.name] for f in record_fields if values[f.name] != f.default}
    return (json.dumps(non_default) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """A loss at a step, a line of metrics.jsonl: an evaluation during training or, in the last
    lines, of a checkpoint on the whole validation split. Losses are in nats per token."""

    step: int = limited(at_least=0)
    tokens: int
    """the number of tokens trained on"""
    seconds: float
    """the time of the run so far"""
    train_loss: float | None
    """the mean loss since the previous evaluation; None at step 0, and without counted targets"""
    val_loss: float
    evaluated_tokens: int | None = None
    """the number of validation tokens that `val_loss` was measured on"""
    accuracy: float | None = limited(default=None, at_least=0, at_most=1)
    """the share of validation examples with right answers, at most 500 of them; None for a text"""
    bits_per_byte: float | None
    """None for ids that are no text"""
    learning_rate: float
    tokens_per_second: int
    checkpoint: str = limited(default="", choices=("", "best", "last"))
    """the checkpoint whose loss on the whole split this is; "" for an evaluation in training"""


def ranking_key(loss: float, accuracy: float | None) -> tuple[float, float]:
    """Return a sort key of evaluations, best first: by accuracy, if it counts, then by loss."""
    return (0.0 if accuracy is None else -accuracy, loss)


# --- Snapshots ------------------------------------------------------------------------------------

PASSAGE = 24
"""the maximum number of tokens in the passage"""
EARLY_STEPS = (1, 3, 10, 30)
"""steps with a snapshot but without an evaluation: heads form in the first steps"""


def packed_maps(maps: NDArray[Any]) -> str:
    """Return maps (…, T, T) up to the diagonal, row by row: a byte each, in steps of 1/255, in
    base64."""
    levels = np.rint(255 * np.nan_to_num(maps[..., *np.tril_indices(maps.shape[-1])]))
    return base64.b64encode(levels.astype(np.uint8).tobytes()).decode()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of a run's model at an evaluation or an early step: a line of ticker.jsonl.

    Raises ValueError if `maps` or `scores` do not have their shape.
    """

    step: int = limited(at_least=0)
    text: str
    """sampled with the same prompt and seed in every snapshot"""
    maps: str | None
    """the attention weights of all heads over the passage, packed by `packed_maps`; None for a
    model without heads (bigram), or whose heads do not record their weights"""
    passage: tuple[str, ...] = ()
    """the tokens of the passage; only the first line of the file has them"""
    shape: tuple[int, ...] = ()
    """the numbers of layers and of maps in each; () if there are no maps"""
    scores: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """the scores of all heads by pattern, in the order of `heads`, layer and head, with three
    decimals; () if there are no maps"""

    def __post_init__(self) -> None:
        try:
            is_whole = self.weights is None or np.shape(self.scores)[1:] in ((), self.shape)
        except ValueError:
            is_whole = False
        if not is_whole:
            raise ValueError("its 'maps' or 'scores' do not have their shape")

    @classmethod
    def of(
        cls,
        step: int,
        text: str,
        maps_LHTT: NDArray[Any] | None,
        scores_PLH: NDArray[Any] | None = None,
        passage: Sequence[str] = (),
    ) -> Snapshot:
        """Return a snapshot with these maps and scores, which it rounds."""
        return cls(
            step=step,
            text=text,
            maps=None if maps_LHTT is None else packed_maps(maps_LHTT),
            passage=tuple(passage),
            shape=() if maps_LHTT is None else maps_LHTT.shape[:2],
            scores=() if scores_PLH is None else scores_PLH.astype(float).round(3).tolist(),
        )

    @cached_property
    def weights(self) -> NDArray[np.float32] | None:
        """The maps (L, H, T, T): row t has the weights of token t on tokens 0 to t."""
        if self.maps is None:
            return None
        layers, heads = self.shape
        levels: NDArray[Any] = np.frombuffer(base64.b64decode(self.maps, validate=True), np.uint8)
        levels = levels.reshape(layers, heads, -1)
        length = (math.isqrt(8 * levels.shape[-1] + 1) - 1) // 2
        weights_LHTT = np.zeros((layers, heads, length, length), np.float32)
        weights_LHTT[..., *np.tril_indices(length)] = levels / np.float32(255)
        return weights_LHTT
