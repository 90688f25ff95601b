"""A run's folder: configuration, tokenizer, metrics, ticker and checkpoints."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import attnlm
from attnlm import files, tokenizer
from attnlm.checkpoint import load_checkpoint, load_facts
from attnlm.config import Config, resolve
from attnlm.dataset import Dataset, open_dataset
from attnlm.device import Device, choose_device
from attnlm.errors import AttnlmError, UsageError
from attnlm.folders import (
    check_name,
    command_for,
    find_folder,
    is_folder,
    remove_leftovers,
    trained_alone,
    workspace,
    write_latest,
)
from attnlm.journal import Journal
from attnlm.model import LanguageModel
from attnlm.ticker import Moment, moment_of, moment_record, ticker_journal

_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """One of a run's two checkpoints, by what it says of itself."""

    which: str
    """best or last"""
    path: Path
    step: int
    val_loss: float | None
    """nats per token; None where no evaluation of this step is recorded"""

    def __str__(self) -> str:
        loss = self.val_loss
        evaluated = "no evaluation recorded" if loss is None else f"validation loss {loss:.4f}"
        return f"step {self.step}, {evaluated} ({self.which})"


@dataclass(frozen=True)
class Run:
    """A run that was begun: `path` holds all that is needed to sample from it or to go on."""

    path: Path
    config: Config
    vocab_size: int
    parameters: int
    dataset: Mapping[str, Any]
    """Of the data set: name, path, hashes of its files, tokens, and the losses to compare with."""
    stopped_after: float = 0.0
    """Seconds of training when it was stopped between evaluations; 0 where it never was."""

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {self.config.model.model}, {self.parameters:,} parameters>"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    def checkpoint(self, which: str = "auto") -> Checkpoint:
        """Its `best` or `last` checkpoint; `auto`: best, or last while only step 0 was evaluated.

        Raises UsageError for any other word, AttnlmError where the file is missing or damaged.
        """
        if which not in ("auto", "best", "last"):
            raise UsageError(f"--checkpoint can't be {which!r}", "it is auto, best or last")
        if which == "auto":
            which = "last" if self._is_best_untrained() else "best"
        path = self.best if which == "best" else self.last
        facts = self._facts(path)
        loss = facts.get("val_loss")
        if loss is None:
            with contextlib.suppress(AttnlmError):  # a damaged record is not what is asked for
                of_steps = {record["step"]: record["val_loss"] for record in self.metrics()}
                loss = of_steps.get(facts["step"])
        return Checkpoint(which, path, facts["step"], loss)

    def _is_best_untrained(self) -> bool:
        """Whether the last checkpoint is trained, and no trained one was evaluated yet."""
        if not self.last.exists() or (self.best.exists() and self._facts(self.best)["step"] > 0):
            return False
        last = self._facts(self.last)
        return not self.best.exists() or last.get("evaluated_step") == 0 < last["step"]

    def _facts(self, path: Path) -> dict[str, Any]:
        facts = load_facts(path, self.config.model, self.vocab_size)
        if type(facts.get("step")) is not int or type(facts.get("val_loss", 0.0)) is not float:
            raise _damaged(path)
        return facts

    @cached_property
    def tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer that the run's data were encoded with; it lies in the run's folder."""
        path = self.path / "tokenizer.json"
        loaded = tokenizer.load(path)
        if loaded.vocab_size != self.vocab_size:
            raise _damaged(path)
        return loaded

    def metrics(self) -> list[dict[str, Any]]:
        """One record per evaluation, oldest first. A line cut short by a crash is left out."""
        return self._metrics.records()

    def metrics_until(self, evaluated_step: int) -> list[dict[str, Any]]:
        """The records up to an evaluation, −1 for none.

        Raises AttnlmError where that of this evaluation is missing.
        """
        kept = [record for record in self.metrics() if record["step"] <= evaluated_step]
        if (kept[-1]["step"] if kept else -1) != evaluated_step:
            raise self._metrics.damaged()
        return kept

    def ticker(self) -> list[Moment]:
        """What the model said and saw at each evaluation, oldest first; none in an older run.

        Raises AttnlmError where the file is damaged. A line that is missing is not missed.
        """
        return [moment_of(record, self.config.model) for record in self._ticker.records()]

    def ticker_passage(self) -> list[str]:
        """The tokens that the ticker's maps are of; none in an older run."""
        return next((r["passage"] for r in self._ticker.records() if "passage" in r), [])

    def append_evaluation(
        self, record: Mapping[str, Any], moment: Moment, passage: list[str]
    ) -> None:
        """Adds a record to the metrics, and a moment to the ticker while that has room.

        The ticker's first line holds the passage that its maps are of.
        """
        self._metrics.append(record)
        about = {} if self._ticker.size() else {"passage": passage}
        line = {**moment_record(moment), **about}
        if self._ticker.has_room(line):
            self._ticker.append(line)

    def keep_until(self, evaluated_step: int) -> None:
        """Drops what was recorded after an evaluation. Raises AttnlmError as reading does."""
        metrics = self.metrics_until(evaluated_step)
        steps = {record["step"] for record in metrics}
        ticker = [line for line in self._ticker.records() if line["step"] in steps]
        self._metrics.replace(metrics)
        self._ticker.replace(ticker)

    @property
    def _metrics(self) -> Journal:
        return Journal(
            path=self.path / "metrics.jsonl",
            is_valid=_is_evaluation,
            hint="copy the run's folder again from where it came",
            longest_line=2**12,
            largest=2**28,
            keys_without_checksum=_KEYS,
        )

    @property
    def _ticker(self) -> Journal:
        return ticker_journal(self.path, self.config.model)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else trains this run meanwhile; what a killed process left in it is removed.

        Raises AttnlmError when somebody does.
        """
        with trained_alone(self.path, "wait until that ends, or stop it; or train another run"):
            files.remove_leftovers(self.path)
            remove_leftovers(self.path.parent)
            yield

    def save_config(self) -> None:
        """Writes config.json."""
        content = {
            "format": _FORMAT,
            "attnlm": attnlm.__version__,
            "config": self.config.settings(),
            "vocab_size": self.vocab_size,
            "parameters": self.parameters,
            "dataset": dict(self.dataset),
            "stopped_after": self.stopped_after,
        }
        files.write_json(self.path / "config.json", content)


def create_run(
    config: Config, dataset: Dataset, parameters: int, *, name: str | None, checkpoint_dir: Path
) -> Run:
    """Makes the folder of a new run, `<model>-001` and so on unless named: whole from the first.

    Raises AttnlmError when the name is taken, UsageError when it can't be a folder's name.
    """
    about = {
        "name": dataset.name,
        "path": str(dataset.path),
        "train_sha256": dataset.train_sha256,
        "val_sha256": dataset.val_sha256,
        "train_tokens": dataset.train_tokens,
        "val_tokens": dataset.val_tokens,
        "val_bytes": dataset.val_bytes,
        "bigram_loss": dataset.bigram_loss,
        "floor": dataset.floor,
    }
    if name is not None:
        check_name(name, "--name")
    with workspace(checkpoint_dir) as work:
        new = work / "new"
        new.mkdir()
        tokenizer.save(dataset.tokenizer, new / "tokenizer.json")
        run = Run(new, config, dataset.vocab_size, parameters, about)
        run.save_config()
        run = replace(run, path=_put_in_place(new, checkpoint_dir, config.model.model, name))
    write_latest(checkpoint_dir, run.name)
    return run


def open_run(
    name: str | Path | Run | None = None, *, checkpoint_dir: str | Path = "checkpoints"
) -> Run:
    """The run of that name in `checkpoint_dir`, or at that path, or the one trained last.

    One that is open already is returned as it is. Raises AttnlmError when there is none, or when
    its configuration is damaged.
    """
    if isinstance(name, Run):
        return name
    path = find_folder(name, Path(checkpoint_dir), kind="run")
    if (path / "ladder.json").exists():
        raise AttnlmError(
            f"{path.name} is a ladder, not a run", f"name a rung of it, as in {path.name}-bigram"
        )
    content = {"stopped_after": 0.0, **files.read_json(path / "config.json")}
    if content.get("format") != _FORMAT:
        raise AttnlmError(
            f"{path / 'config.json'} was written by another version of attnlm", "use that version"
        )
    if not all(key in content and is_valid(content[key]) for key, is_valid in _CONTENT.items()):
        raise _damaged(path / "config.json")
    try:
        config = resolve({}, content["config"])
    except AttnlmError as error:
        raise AttnlmError(f"{path / 'config.json'} is damaged: {error}", error.hint) from None
    if config.training.steps is None:
        raise _damaged(path / "config.json")
    facts = {key: content[key] for key in _CONTENT if key != "config"}
    return Run(path, config, **facts)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 2**48


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_loss(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value))


_DATASET_FACTS: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str),
    "path": lambda value: isinstance(value, str) and "\0" not in value,
    "train_sha256": lambda value: isinstance(value, str),
    "val_sha256": lambda value: isinstance(value, str),
    "train_tokens": _is_count,
    "val_tokens": _is_count,
    "val_bytes": _is_count,
    "bigram_loss": _is_loss,
    "floor": _is_loss,
}


def _is_dataset(value: object) -> bool:
    return isinstance(value, dict) and all(
        key in value and is_valid(value[key]) for key, is_valid in _DATASET_FACTS.items()
    )


_CONTENT: dict[str, Callable[[Any], bool]] = {
    "config": lambda value: isinstance(value, dict),
    "vocab_size": lambda value: _is_count(value) and value <= 2**21,
    "parameters": _is_count,
    "dataset": _is_dataset,
    "stopped_after": lambda value: _is_number(value) and value >= 0,
}


def load_model(
    run: str | Path | Run | None = None,
    *,
    checkpoint: str = "auto",
    device: str = "auto",
    checkpoint_dir: str | Path = "checkpoints",
) -> tuple[LanguageModel, Device]:
    """The model of a run (by default the one trained last), ready to be used, and its device.

    The model is a torch.nn.Module in evaluation mode, on `device.torch`: ids (B, T) of at most
    block_size tokens → logits (B, T, V).

        model, device = attnlm.load_model("multi-head-001")
        ids = attnlm.open_run("multi-head-001").tokenizer.encode("To be")
        logits = model(torch.tensor([ids], device=device.torch))

    `checkpoint` is auto, best or last, `device` auto, cpu, cuda or mps. Raises AttnlmError when
    files are missing or damaged, or the device can't be had.
    """
    run = open_run(run, checkpoint_dir=checkpoint_dir)
    path = run.checkpoint(checkpoint).path
    # A run in float32 stays so on any device; bfloat16 only where the hardware has it.
    dtype = "float32" if run.config.training.dtype == "float32" else "auto"
    chosen = choose_device(device, dtype)
    model, _, _ = load_checkpoint(path, run.config.model, run.vocab_size)
    return model.to(chosen.torch).eval(), chosen


def open_dataset_of(run: Run, data_dir: Path, *, verify: bool = False) -> Dataset:
    """The data set that a run is trained on: where it was, or by its name below `data_dir`.

    Raises AttnlmError when it is gone, or is another one by now.
    """
    recorded = Path(run.dataset["path"])
    dataset = open_dataset(
        recorded if is_folder(recorded) else run.dataset["name"],
        data_dir=data_dir,
        verify=verify,
    )
    recorded_facts = {**run.dataset, "vocab_size": run.vocab_size}
    for key in ("train_sha256", "val_sha256", "vocab_size"):
        if getattr(dataset, key) != recorded_facts[key]:
            raise AttnlmError(
                f"{dataset.path} is not the data set that {run.name} was trained on",
                f"prepare that one again, or move it to {recorded}",
            )
    return dataset


def _put_in_place(new: Path, checkpoint_dir: Path, model: str, name: str | None) -> Path:
    """Moves a run's folder to its name, unless that is taken."""
    for number in itertools.count(1):
        path = checkpoint_dir / (name or f"{model}-{number:03}")
        try:
            # An empty folder could be replaced, but it is somebody's.
            if not os.path.lexists(path):
                new.rename(path)
                return path
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if name is not None:
            break
    raise AttnlmError(
        f"there is a run called {name} already, and runs are never overwritten",
        f"give another --name, or go on with it: {command_for('attnlm train --resume', path)}",
    )


_NUMBERS = (
    *("step", "tokens", "seconds", "val_loss"),
    *("bits_per_byte", "learning_rate", "tokens_per_second"),
)
_KEYS = frozenset({*_NUMBERS, "train_loss"})


def _is_evaluation(record: dict[str, Any]) -> bool:
    """Whether these are a line's values: finite numbers; no training loss before the first step."""
    known = record["train_loss"] is None or _is_number(record["train_loss"])
    return known and all(_is_number(record[key]) for key in _NUMBERS)


def _damaged(path: Path) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged or not ours", "copy the run's folder again from where it came"
    )
