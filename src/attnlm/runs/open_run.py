"""Opens runs and their data sets. Nothing here needs torch, which takes a second to load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnlm.base import files
from attnlm.base.commands import how_to_make
from attnlm.base.entries import problem_of
from attnlm.base.errors import AttnlmError
from attnlm.base.folders import find_folder, is_folder
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.runs.run import FORMAT, Run, damaged, is_number


def open_run(
    name: str | Path | Run | None = None, *, checkpoint_dir: str | Path = "checkpoints"
) -> Run:
    """The run of that name in `checkpoint_dir`, or at that path, or the one trained last.

        run = attnlm.open_run("multi-head-001")
        run.config.training.steps, run.metrics()[-1]["val_loss"]

    An opened run is returned unchanged. Raises AttnlmError when there is none, or when
    its configuration is damaged.
    """
    if isinstance(name, Run):
        return name
    path = find_folder(name, Path(checkpoint_dir), kind="run")
    if problem := problem_of(path):
        raise AttnlmError(f"can't open {path}: {problem}", "check its permissions")
    if (path / "ladder.json").exists():
        raise AttnlmError(
            f"{path.name} is a ladder, not a run", f"name a rung of it, as in {path.name}-bigram"
        )
    if (path / "generation_config.json").exists() and not (path / "metrics.jsonl").exists():
        raise AttnlmError(
            f"{path} is a folder of Hugging Face's format, not a run",
            f"make a run of it: attnlm import {path}",
        )
    if not (path / "config.json").exists():
        raise AttnlmError(
            f"{path} is not a run: it has no config.json", how_to_make("run", Path(checkpoint_dir))
        )
    known_later = {"stopped_after": 0.0, "parent": None, "imported_from": ""}
    content = {**known_later, **files.read_json(path / "config.json")}
    if content.get("format") != FORMAT:
        raise AttnlmError(
            f"{path / 'config.json'} was written by another version of attnlm", "use that version"
        )
    if not all(key in content and is_valid(content[key]) for key, is_valid in _CONTENT.items()):
        raise damaged(path / "config.json")
    try:
        config = resolve({}, content["config"])
    except AttnlmError as error:
        raise AttnlmError(f"{path / 'config.json'} is damaged: {error}", error.hint) from None
    about = content["dataset"]
    trained_on = all(about[key] for key in ("train_tokens", "val_tokens", "val_bytes"))
    if config.training.steps is None or not (trained_on or content["imported_from"]):
        raise damaged(path / "config.json")
    facts = {key: content[key] for key in _CONTENT if key != "config"}
    return Run(path, config, **facts)


def is_count(value: object) -> bool:
    """Whether a JSON value is a plausible number of things."""
    return type(value) is int and 0 < value < 2**48


def _is_loss(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _is_amount(value: object) -> bool:
    """An imported run was trained on nothing here."""
    return is_count(value) or (type(value) is int and value == 0)


_DATASET_FACTS: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str),
    "path": lambda value: isinstance(value, str) and "\0" not in value,
    "train_sha256": lambda value: isinstance(value, str),
    "val_sha256": lambda value: isinstance(value, str),
    "train_tokens": _is_amount,
    "val_tokens": _is_amount,
    "val_bytes": _is_amount,
    "bigram_loss": _is_loss,
    "floor": _is_loss,
}


def _has(facts: Mapping[str, Callable[[Any], bool]], value: object) -> bool:
    return isinstance(value, dict) and all(
        key in value and is_valid(value[key]) for key, is_valid in facts.items()
    )


_PARENT_FACTS: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str),
    "path": _DATASET_FACTS["path"],
    "checkpoint": lambda value: value in ("best", "last", "best.safetensors", "last.safetensors"),
    "step": lambda value: type(value) is int and value >= 0,
    "sha256": lambda value: isinstance(value, str),
}


_CONTENT: dict[str, Callable[[Any], bool]] = {
    "config": lambda value: isinstance(value, dict),
    "vocab_size": lambda value: is_count(value) and value <= 2**21,
    "parameters": is_count,
    "dataset": lambda value: _has(_DATASET_FACTS, value),
    "stopped_after": lambda value: is_number(value) and value >= 0,
    "parent": lambda value: value is None or _has(_PARENT_FACTS, value),
    "imported_from": lambda value: isinstance(value, str),
}


def open_dataset_of(run: Run, data_dir: Path, *, verify: bool = False) -> Dataset:
    """The data set that a run is trained on: where it was, or by its name below `data_dir`.

    Raises AttnlmError when it is gone, or is another one by now, and for an imported run.
    """
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported, and has no data set of its own",
            "prepare one with its tokenizer, and give it as `data`",
        )
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
