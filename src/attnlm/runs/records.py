"""The records in a run's JSON files: config.json, whole.json, and the facts of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlm.base.json_records import limited

if TYPE_CHECKING:
    from attnlm.data.dataset import Dataset
    from attnlm.runs.ladder_plan import LadderPlan

NOT_COMPARABLE = "not comparable: the model sees later tokens"

_COUNT: Any = {"at_least": 0, "below": 2**48}


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """The entry in config.json for the run's data set. For an imported run, it has only a name."""

    name: str
    path: str = limited(default="", matches=r"[^\0]*")
    train_sha256: str = ""
    val_sha256: str = ""
    train_tokens: int = limited(default=0, **_COUNT)
    val_tokens: int = limited(default=0, **_COUNT)
    val_bytes: int = limited(default=0, **_COUNT)
    bigram_loss: float | None = None
    floor: float | None = None
    question_end: str | None = None
    """the text between a question and its answer; None for a text without questions"""
    answer_end: str | None = None
    """the text that ends an answer; "" for the tokenizer's end-of-text id"""


@dataclass(frozen=True, kw_only=True)
class ParentRecord:
    """The record, in config.json, of the run whose weights this run started from."""

    name: str
    path: str = limited(matches=r"[^\0]*")
    checkpoint: str = limited(choices=("best", "last"))
    step: int = limited(at_least=0)
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about a run in config.json, in addition to its settings."""

    vocab_size: int = limited(at_least=1, at_most=2**21)
    parameters: int = limited(at_least=1, below=2**48)
    dataset: DatasetFacts
    """the data set's name, path, hashes, token counts and reference losses"""
    stopped_after: float = limited(default=0.0, at_least=0)
    """seconds of training when the run was last stopped between two evaluations; 0 if never"""
    parent: ParentRecord | None = None
    """the run whose weights it started from: name, path, checkpoint, step and hash"""
    imported_from: str = ""
    """where its weights were imported from; "" if it was trained here"""
    leaks: str = ""
    """how its logits depend on later tokens, so that its losses mean nothing; "" if they do not"""


@dataclass(frozen=True, kw_only=True)
class StoredRun(RunFacts):
    """The content of config.json."""

    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """The facts that any checkpoint may have: JSON values in addition to tensors.

    The last checkpoint of a training also has the other numbers of SavedState.
    """

    step: int = limited(at_least=0)
    val_loss: float | None = None
    evaluated_step: int | None = None
    best_step: int | None = None
    best_loss: float | None = limited(default=None, at_most=math.inf)
    best_accuracy: float | None = None

    def content(self) -> dict[str, Any]:
        """Return the facts that are known, as JSON values."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A checkpoint's loss on the whole validation split."""

    step: int = limited(at_least=0)
    val_loss: float
    bits_per_byte: float | None
    evaluated_tokens: int
    accuracy: float | None = limited(default=None, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class WholeSplitLosses:
    """The content of whole.json."""

    best: Measured
    last: Measured


def has_same_ids(dataset: Dataset, recorded: DatasetFacts | LadderPlan) -> bool:
    """Return True if a data set has the ids that a run or a ladder has recorded."""
    hashes = (recorded.train_sha256, recorded.val_sha256)
    return (dataset.train_sha256, dataset.val_sha256) == hashes


def reference_losses(vocab_size: int, dataset: DatasetFacts | Dataset) -> dict[str, float]:
    """Return known losses in nats per token: uniform, bigram and floor, the least possible."""
    losses = {
        "uniform (ln V)": math.log(vocab_size),
        "counted bigram": dataset.bigram_loss,
        "floor": dataset.floor,
    }
    return {name: loss for name, loss in losses.items() if loss is not None}
