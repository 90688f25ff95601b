"""attnlm: prepare a text, train small attention language models on it, read what they learned.

The environment is left as it is. On a machine that has other work too, set GOMP_SPINCOUNT=10000
before PyTorch is imported, as the command does: threads that wait for each other then sleep.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlm.dataset import Dataset, open_dataset
    from attnlm.errors import AttnlmError, UsageError
    from attnlm.evaluation import Evaluation, evaluate
    from attnlm.launch import train
    from attnlm.preparation import prepare
    from attnlm.run import Run, load_model, open_run
    from attnlm.sampling import sample

__version__ = "0.1.0"

_HOMES = {
    "AttnlmError": "errors",
    "Dataset": "dataset",
    "Evaluation": "evaluation",
    "Run": "run",
    "UsageError": "errors",
    "evaluate": "evaluation",
    "load_model": "run",
    "open_dataset": "dataset",
    "open_run": "run",
    "prepare": "preparation",
    "sample": "sampling",
    "train": "launch",
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
