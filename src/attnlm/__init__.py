"""Prepare a text, train small attention language models on it, and read what they learned.

    prepare       a text → a Dataset: tokenizer, training and validation split
    train         a Dataset → a Run: a folder with configuration, metrics and weights
    sample        text from a Run, piece by piece; `samples` returns several whole texts
    evaluate      a Run's loss over a whole validation split
    open_dataset  a Dataset that was prepared before, by name or path
    open_run      a Run that was trained before, by name or path
    load_model    a Run's model, a torch.nn.Module: ids (B, T) → logits (B, T, V)

`help(attnlm.train)` lists all settings of models and training. An example:

    import attnlm, torch

    dataset = attnlm.prepare("tales")
    run = attnlm.train(dataset, model="single-head", steps=50, seed=1)
    print(attnlm.evaluate(run).loss)
    print("".join(attnlm.sample(run, tokens=100, prompt="Once ", seed=1)))

    model, device = attnlm.load_model(run)
    ids = torch.tensor([run.tokenizer.encode("Once ")], device=device.torch)
    print(model(ids).softmax(-1)[0, -1])  # the probabilities of the next token

Nothing is printed. What happens is reported to `on_event`, a function of one argument: `prepare`
reports Note and Progress, `train` also Started, Stepped, Evaluated and Finished; `on_event=print`
shows them. Errors are AttnlmError, with a `message` and a `hint`; UsageError is one whose cause is
invalid arguments.

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
    from attnlm.events import Note, Progress
    from attnlm.launch import train
    from attnlm.preparation import prepare
    from attnlm.run import Run, load_model, open_run
    from attnlm.sampling import sample, samples
    from attnlm.training import Evaluated, Finished, Started, Stepped

__version__ = "0.1.0"

_HOMES = {
    "AttnlmError": "errors",
    "Dataset": "dataset",
    "Evaluated": "training",
    "Evaluation": "evaluation",
    "Finished": "training",
    "Note": "events",
    "Progress": "events",
    "Run": "run",
    "Started": "training",
    "Stepped": "training",
    "UsageError": "errors",
    "evaluate": "evaluation",
    "load_model": "run",
    "open_dataset": "dataset",
    "open_run": "run",
    "prepare": "preparation",
    "sample": "sampling",
    "samples": "sampling",
    "train": "launch",
}

__all__ = [
    "AttnlmError",
    "Dataset",
    "Evaluated",
    "Evaluation",
    "Finished",
    "Note",
    "Progress",
    "Run",
    "Started",
    "Stepped",
    "UsageError",
    "__version__",
    "evaluate",
    "load_model",
    "open_dataset",
    "open_run",
    "prepare",
    "sample",
    "samples",
    "train",
]


if not TYPE_CHECKING:  # for type checkers every name would be there, of any type

    def __getattr__(name: str) -> Any:
        """Loads what is asked for only then: `attnlm --help` does not wait for torch."""
        if name in _HOMES:
            return getattr(importlib.import_module(f"attnlm.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'attnlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
