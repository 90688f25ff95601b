"""attnlm: prepare a text, train small attention language models on it, read what they learned."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlm.base.errors import AttnlmError, UsageError
    from attnlm.data.dataset import Dataset, open_dataset
    from attnlm.data.prepare import prepare
    from attnlm.experiments.evaluate import Evaluation, evaluate
    from attnlm.experiments.train import train
    from attnlm.generation.sampling import sample
    from attnlm.runs.run import Run, load_model, open_run

__version__ = "0.1.0"

_HOMES = {
    "AttnlmError": "base.errors",
    "Dataset": "data.dataset",
    "Evaluation": "experiments.evaluate",
    "Run": "runs.run",
    "UsageError": "base.errors",
    "evaluate": "experiments.evaluate",
    "load_model": "runs.run",
    "open_dataset": "data.dataset",
    "open_run": "runs.run",
    "prepare": "data.prepare",
    "sample": "generation.sampling",
    "train": "experiments.train",
}

__all__ = [
    "AttnlmError",
    "Dataset",
    "Evaluation",
    "Run",
    "UsageError",
    "__version__",
    "evaluate",
    "load_model",
    "open_dataset",
    "open_run",
    "prepare",
    "sample",
    "train",
]


def __getattr__(name: str) -> Any:
    """Loads what is asked for only then: `attnlm --help` does not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"attnlm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'attnlm' has no attribute {name!r}")
