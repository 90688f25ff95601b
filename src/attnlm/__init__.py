"""Prepare a text, train small attention language models on it, and read what they learned.

    prepare       a text → a Dataset: tokenizer, training and validation split
    train         a Dataset → a Run: a folder with configuration, metrics and weights
    sample        text from a Run, piece by piece; `samples` returns several whole texts
    evaluate      a Run's loss over a whole validation split
    attend        what each head of a Run attends to in a text: arrays, labelled with tokens
    export        a Run → a folder or file that other tools load
    import_run    a folder that Hugging Face's tools wrote → a Run
    open_dataset  a Dataset that was prepared before, by name or path: its `train` and `val` are ids
    Batches       inputs and targets for a training loop of your own, by (seed, step)
    open_run      a Run that was trained before, by name or path
    list_runs     the runs in a folder; `list_datasets` and `list_recipes` do the same for those
    diff_runs     what two Runs have differently
    remove_run    takes a Run away
    doctor        what this machine has, and what to do about what it lacks
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
reports Note and Progress, `train` also Started, Stepped, Evaluated, Replanned and Finished;
`on_event=print` shows each as a line, `on_event=attnlm.ProgressBar()` shows a bar. For fewer lines,
choose: `lambda event: isinstance(event, attnlm.Evaluated) and print(event)`. A notebook shows a Run
as a table with its curve, and its attention as a shaded grid for each head.

Errors are AttnlmError, with a `message` and a `hint`; UsageError is one whose cause is invalid
arguments.

The environment is left as it is. On a machine that has other work too, set GOMP_SPINCOUNT=10000
before PyTorch is imported, as the command does: threads that wait for each other then sleep.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlm.base.errors import AttnlmError, UsageError
    from attnlm.base.events import Note, Progress
    from attnlm.config.recipes import RecipeEntry, list_recipes
    from attnlm.data.batches import Batches
    from attnlm.data.dataset import Dataset, open_dataset
    from attnlm.data.list_datasets import DatasetEntry, list_datasets
    from attnlm.data.prepare import prepare
    from attnlm.experiments.doctor import Finding, doctor
    from attnlm.experiments.evaluate import evaluate
    from attnlm.experiments.export import export
    from attnlm.experiments.train import train
    from attnlm.generation.sampling import sample, samples
    from attnlm.runs.diff import RunDiff, diff_runs
    from attnlm.runs.hugging_face.import_run import import_run
    from attnlm.runs.list_runs import RunEntry, list_runs
    from attnlm.runs.load_model import load_model
    from attnlm.runs.open_run import open_run
    from attnlm.runs.remove import remove_run
    from attnlm.runs.run import Run
    from attnlm.see.attend import Attention, attend
    from attnlm.see.progress_bar import ProgressBar
    from attnlm.training.events import Evaluated, Finished, Replanned, Started, Stepped
    from attnlm.training.validation import Evaluation

__version__ = "1.0.0"

_HOMES = {
    "Attention": "see.attend",
    "AttnlmError": "base.errors",
    "Batches": "data.batches",
    "Dataset": "data.dataset",
    "DatasetEntry": "data.list_datasets",
    "Evaluated": "training.events",
    "Evaluation": "training.validation",
    "Finding": "experiments.doctor",
    "Finished": "training.events",
    "Note": "base.events",
    "Progress": "base.events",
    "ProgressBar": "see.progress_bar",
    "RecipeEntry": "config.recipes",
    "Replanned": "training.events",
    "Run": "runs.run",
    "RunDiff": "runs.diff",
    "RunEntry": "runs.list_runs",
    "Started": "training.events",
    "Stepped": "training.events",
    "UsageError": "base.errors",
    "attend": "see.attend",
    "diff_runs": "runs.diff",
    "doctor": "experiments.doctor",
    "evaluate": "experiments.evaluate",
    "export": "experiments.export",
    "import_run": "runs.hugging_face.import_run",
    "list_datasets": "data.list_datasets",
    "list_recipes": "config.recipes",
    "list_runs": "runs.list_runs",
    "load_model": "runs.load_model",
    "open_dataset": "data.dataset",
    "open_run": "runs.open_run",
    "prepare": "data.prepare",
    "remove_run": "runs.remove",
    "sample": "generation.sampling",
    "samples": "generation.sampling",
    "train": "experiments.train",
}

__all__ = [
    "Attention",
    "AttnlmError",
    "Batches",
    "Dataset",
    "DatasetEntry",
    "Evaluated",
    "Evaluation",
    "Finding",
    "Finished",
    "Note",
    "Progress",
    "ProgressBar",
    "RecipeEntry",
    "Replanned",
    "Run",
    "RunDiff",
    "RunEntry",
    "Started",
    "Stepped",
    "UsageError",
    "__version__",
    "attend",
    "diff_runs",
    "doctor",
    "evaluate",
    "export",
    "import_run",
    "list_datasets",
    "list_recipes",
    "list_runs",
    "load_model",
    "open_dataset",
    "open_run",
    "prepare",
    "remove_run",
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
