"""Compare the settings, data and results of two runs, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlm.runs.open_run import open_run
from attnlm.runs.run import Run

Pairs = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class RunDiff:
    """Two runs and the values that differ, as (a, b) by name, with None for a missing value."""

    a: Run
    b: Run
    settings: Pairs
    data: Pairs
    result: Pairs
    """all results, equal ones too"""
    warnings: tuple[str, ...]
    """reasons why the results are not directly comparable"""


def diff_runs(
    a: str | Path | Run, b: str | Path | Run, *, checkpoint_dir: str | Path = "checkpoints"
) -> RunDiff:
    """Return how two runs differ in settings and data, and the results of both.

        attnlm.diff_runs("multi-head-001", "transformer-001").settings

    Raises AttnlmError as `open_run` does, and if metrics are damaged.
    """
    first, second = (open_run(run, checkpoint_dir=checkpoint_dir) for run in (a, b))
    results = [_result(run) for run in (first, second)]
    return RunDiff(
        first,
        second,
        settings=_differing(first.config.settings(), second.config.settings()),
        data=_differing(_data(first), _data(second)),
        result=_pairs(*results),
        warnings=tuple(_warnings(first, second)) if all("val_loss" in r for r in results) else (),
    )


def _data(run: Run) -> dict[str, Any]:
    about = run.dataset
    return {
        "dataset": None if run.imported_from else about["name"],
        "train_sha256": about["train_sha256"] or None,
        "val_sha256": about["val_sha256"] or None,
        "train_tokens": about["train_tokens"] or None,
        "val_tokens": about["val_tokens"] or None,
        "tokenizer": run.tokenizer.name,
        "vocab_size": run.vocab_size,
        "bigram_loss": about["bigram_loss"],
        "parent": run.started_from or None,
        "imported_from": run.imported_from or None,
    }


def _result(run: Run) -> dict[str, Any]:
    result = run.result()
    return {"parameters": run.parameters, **({} if result is None else result.facts())}


def _warnings(a: Run, b: Run) -> Iterator[str]:
    if a.tokenizer.to_json() != b.tokenizer.to_json():
        yield "the tokenizers differ, so losses per token cannot be compared: compare bits per byte"
    if a.dataset["val_sha256"] != b.dataset["val_sha256"]:
        yield "the losses were measured on different validation splits"
    for run in (a, b):
        if (result := run.result()) is not None and result.part:
            yield f"the loss of {run.name} was measured on {result.part}"


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in {**a, **b}}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in _pairs(a, b).items() if pair[0] != pair[1]}
