"""A run's folder: configuration, tokenizer, metrics and checkpoints."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import attnlm
from attnlm import files, tokenizer
from attnlm.checkpoint import load_checkpoint
from attnlm.config import Config, resolve
from attnlm.dataset import Dataset, open_dataset
from attnlm.device import Device, choose_device
from attnlm.errors import AttnlmError, UsageError
from attnlm.folders import check_name, find_folder, remove_leftovers, workspace, write_latest
from attnlm.locks import locked
from attnlm.model import LanguageModel

_FORMAT = 1


@dataclass(frozen=True)
class Run:
    """A run that was begun: `path` holds all that is needed to sample from it or to go on."""

    path: Path
    config: Config
    vocab_size: int
    parameters: int
    dataset: Mapping[str, Any]
    """Of the data set: name, path, hashes of its files, tokens, and the losses to compare with."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    def checkpoint(self, which: str) -> Path:
        """The file of `best` or `last`. Raises UsageError for any other word."""
        if which not in ("best", "last"):
            raise UsageError(f"--checkpoint can't be {which!r}", "it is best or last")
        return self.best if which == "best" else self.last

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
        records = []
        path = self.path / "metrics.jsonl"
        if path.exists():
            try:
                text = path.read_text(encoding="utf-8")
            except ValueError:
                raise _damaged(path) from None
            for line in text.splitlines(keepends=True):
                if not line.endswith("\n"):
                    break
                records.append(_metrics_record(line, path))
        return records

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds one record."""
        path = self.path / "metrics.jsonl"
        with files.naming(path), path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(record) + "\n")

    def keep_metrics_until(self, step: int) -> list[dict[str, Any]]:
        """Drops what was recorded after `step`, and returns the rest."""
        kept = [record for record in self.metrics() if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        files.write_bytes(self.path / "metrics.jsonl", lines.encode())
        return kept

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else trains this run meanwhile; what a killed process left in it is removed.

        Raises AttnlmError when somebody does. (Windows and some network file systems can't tell.)
        """
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(locked(self.path))
            except BlockingIOError:
                raise AttnlmError(
                    f"{self.name} is being trained by another process",
                    "wait until that ends, or stop it; or train another run",
                ) from None
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


def open_run(name: str | Path | None, *, checkpoint_dir: Path = Path("checkpoints")) -> Run:
    """The run of that name or path, or the latest one.

    Raises AttnlmError when there is none, or when its configuration is damaged.
    """
    path = find_folder(name, checkpoint_dir, kind="run", hint="train one: attnlm train")
    content = files.read_json(path / "config.json")
    try:
        if content["format"] != _FORMAT:
            raise AttnlmError(
                f"{path} was written by another version of attnlm ({content['attnlm']})",
                "use that version",
            )
        config = resolve({}, content["config"])
        about = dict(content["dataset"])
        whole = all(type(about[key]) is kind for key, kind in _DATASET_FACTS.items())
        vocab_size, parameters = content["vocab_size"], content["parameters"]
        if whole and type(vocab_size) is int and 0 < vocab_size <= 2**21 and config.training.steps:
            return Run(path, config, vocab_size, parameters, about)
    except (KeyError, TypeError, ValueError):
        pass
    raise _damaged(path / "config.json")


_DATASET_FACTS = {
    "name": str,
    "path": str,
    "train_sha256": str,
    "val_sha256": str,
    "train_tokens": int,
    "val_tokens": int,
    "val_bytes": int,
}


def load_model(run: Run, *, checkpoint: str, device: str) -> tuple[LanguageModel, Device]:
    """The model of a run's best or last checkpoint on a device, and that device.

    Raises AttnlmError when files are missing or damaged, or the device can't be had.
    """
    path = run.checkpoint(checkpoint)
    # A run in float32 stays so on any device; bfloat16 only where the hardware has it.
    dtype = "float32" if run.config.training.dtype == "float32" else "auto"
    chosen = choose_device(device, dtype)
    model, _, _ = load_checkpoint(path, run.config.model, run.vocab_size)
    return model.to(chosen.torch), chosen


def open_dataset_of(run: Run, data_dir: Path) -> Dataset:
    """The data set that a run is trained on: where it was, or by its name below `data_dir`.

    Raises AttnlmError when it is gone, or is another one by now.
    """
    recorded = Path(run.dataset["path"])
    dataset = open_dataset(
        recorded if recorded.is_dir() else run.dataset["name"], data_dir=data_dir
    )
    for key in ("train_sha256", "val_sha256"):
        if getattr(dataset, key) != run.dataset[key]:
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
        f"give another --name, or go on with it: attnlm train --resume {name}",
    )


_NUMBERS = ("step", "tokens", "seconds", "val_loss", "bits_per_byte", "tokens_per_second")


def _metrics_record(line: str, path: Path) -> dict[str, Any]:
    try:
        record = dict(json.loads(line))
        if all(isinstance(record[key], (int, float)) for key in _NUMBERS):
            return record
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _damaged(path)


def _damaged(path: Path) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged or not ours", "copy the run's folder again from where it came"
    )
