"""The records in a run's JSON files: config.json, and the facts of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlm.base.setting_fields import fields_of, limited

if TYPE_CHECKING:
    from attnlm.data.dataset import Dataset

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
    checkpoint: str = limited(matches=r"best|last|\d+")
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


@dataclass(kw_only=True)
class CheckpointFacts:
    """The facts that a checkpoint holds with the tensors. The last checkpoint of a training has all
    of them but `val_loss`.

    No random state is saved, since the seed and the step determine the random numbers.
    """

    step: int = limited(default=0, at_least=0)
    val_loss: float | None = None
    evaluated_step: int = limited(default=-1, at_least=-1)
    """the step of the newest evaluation; −1 before the first"""
    best_step: int = limited(default=0, at_least=0)
    best_loss: float = limited(default=math.inf, at_most=math.inf)
    best_accuracy: float | None = limited(default=None, at_least=0, at_most=1)
    """the accuracy at `best_step`, if the best is chosen by accuracy"""
    stale: int = limited(default=0, at_least=0)
    """the number of evaluations since the best one"""
    loss_sum: float = limited(default=0.0, at_least=-1e38, at_most=1e38)
    """the sum of the losses of the counted steps"""
    counted_steps: int = limited(default=0, at_least=0)
    """the number of steps since the newest evaluation with a target that is not ignored"""
    progress: float = limited(default=0.0, at_least=0, at_most=1)
    """the fraction of its budget that a run with a budget has used"""
    sha256: str = ""
    """the hash of the tensors and the other facts of a saved checkpoint"""

    def content(self) -> dict[str, Any]:
        """Return the step, and other facts that have not their default, but not the hash."""
        others = [f for f in fields_of(CheckpointFacts).values() if f.name != "sha256"]
        changed = {f.name: value for f in others if (value := getattr(self, f.name)) != f.default}
        return {"step": self.step, **changed}


def dataset_facts(dataset: Dataset) -> DatasetFacts:
    """Return what a run or a ladder records of its data set."""
    names = ("name", "train_sha256", "val_sha256", "train_tokens", "val_tokens", "val_bytes")
    examples = dataset.examples
    return DatasetFacts(
        **{name: getattr(dataset, name) for name in (*names, "bigram_loss", "floor")},
        path=str(dataset.path.absolute()),
        question_end=None if examples is None else examples.question_end,
        answer_end=None if examples is None else examples.answer_end,
    )


def has_same_ids(dataset: Dataset, recorded: DatasetFacts) -> bool:
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
