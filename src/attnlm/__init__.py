"""Prepare a text, train small attention language models on it, and read what they learned.

    prepare       a text → a Dataset: tokenizer, training and validation split
    train         a Dataset → a Run: a folder with configuration, metrics and weights
    estimate      what `train` would cost: parameters, memory, operations, time
    sample        text from a Run, piece by piece; `samples` returns several whole texts
    evaluate      a Run's loss on a validation split
    generate      a Run's answers to questions; `answer_pairs` compares them with the right ones
    ladder        several models, trained on the same batches and compared
    exam          what a part or model can do, task by task, beside the standard one
    attend        what each head of a Run attends to in a text: arrays, labelled with tokens
    check         what holds for a class or function of your own, before it is trained
    accept_code   lets the own code of somebody's run run here, once you read it
    save_run      a Run of a model that a loop of your own trained
    patch         which places of a model carry the difference between two texts
    heads         scores and names of a Run's heads; `heads_over_training` at each evaluation
    trace         one forward pass of a Run, step by step, or as a PyTorch script
    report        all results of a Run, for use in Python or as a page
    export        a Run → a folder or file that other tools load
    import_run    a folder that Hugging Face's tools wrote → a Run
    open_dataset  a Dataset that was prepared before, by name or path: its `train` and `val` are ids
    Batches       inputs and targets for a training loop of your own, by (seed, step)
    open_run      a Run that was trained before, by name or path
    list_runs     the runs in a folder; see also `list_datasets`, `list_recipes`, `list_heads`
    compare       Comparison: is one group of runs better than another?
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

Nothing is printed. Events are passed to `on_event`, a function of one argument: `prepare`
reports Note and Progress, `train` also Started, Stepped, Evaluated and Finished;
`on_event=print` shows each as a line, `on_event=attnlm.ProgressBar()` shows a bar. For fewer lines,
filter: `lambda event: isinstance(event, attnlm.Evaluated) and print(event)`. A notebook shows a Run
as a table with its curve, and an Attention as a picture of each head's map.

A training loop of your own (see Batches) has another optimizer, schedule, initialisation and
evaluation than `train`. Compare its losses only with those of a baseline in the same loop.

Errors are AttnlmError, with a `message` and a `hint`. Its subclass UsageError reports invalid
values; an argument of a wrong type may raise TypeError.

Functions ignore PyTorch's default dtype and device, autocast and gradient mode of the program
around them, and restore them.

Environment variables are not changed, with two exceptions: if training compiles the model, it sets
PYTHONSAFEPATH=1 and, unless you have set it, TORCHINDUCTOR_CACHE_DIR. On a machine that runs other
work too, set GOMP_SPINCOUNT=10000 before PyTorch is imported: threads that wait for each other then
sleep. The command `attnlm` sets it itself.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from attnlm.compute.torch_settings import with_usual_torch_settings

if TYPE_CHECKING:
    from attnlm.base.errors import AttnlmError as AttnlmError
    from attnlm.base.errors import UsageError as UsageError
    from attnlm.base.events import Note as Note
    from attnlm.base.events import Progress as Progress
    from attnlm.base.heads import HeadEntry as HeadEntry
    from attnlm.base.heads import list_heads as list_heads
    from attnlm.base.own_code import accept_code as accept_code
    from attnlm.config.recipes import RecipeEntry as RecipeEntry
    from attnlm.config.recipes import list_recipes as list_recipes
    from attnlm.data.batches import Batches as Batches
    from attnlm.data.dataset import Dataset as Dataset
    from attnlm.data.dataset import DatasetEntry as DatasetEntry
    from attnlm.data.dataset import list_datasets as list_datasets
    from attnlm.data.dataset import open_dataset as open_dataset
    from attnlm.data.prepare import prepare as prepare
    from attnlm.generation.sampling import sample as sample
    from attnlm.generation.sampling import samples as samples
    from attnlm.runs.hugging_face import import_run as import_run
    from attnlm.runs.load_model import load_model as load_model
    from attnlm.runs.manage import RunEntry as RunEntry
    from attnlm.runs.manage import list_runs as list_runs
    from attnlm.runs.run import Run as Run
    from attnlm.runs.run import open_run as open_run
    from attnlm.see.attend import Attention as Attention
    from attnlm.see.attend import attend as attend
    from attnlm.see.comparison import Comparison as Comparison
    from attnlm.see.comparison import Group as Group
    from attnlm.see.exam_card import Exam as Exam
    from attnlm.see.heads import HeadsOverTraining as HeadsOverTraining
    from attnlm.see.heads import HeadsReport as HeadsReport
    from attnlm.see.heads import heads as heads
    from attnlm.see.heads import heads_over_training as heads_over_training
    from attnlm.see.patch import Patching as Patching
    from attnlm.see.patch import patch as patch
    from attnlm.see.progress_bar import ProgressBar as ProgressBar
    from attnlm.see.report import Report as Report
    from attnlm.see.report import report as report
    from attnlm.see.trace import Trace as Trace
    from attnlm.see.trace import trace as trace
    from attnlm.training.events import Evaluated as Evaluated
    from attnlm.training.events import Finished as Finished
    from attnlm.training.events import Started as Started
    from attnlm.training.events import Stepped as Stepped
    from attnlm.training.validation import Evaluation as Evaluation
    from attnlm.workflows.answers import Answered as Answered
    from attnlm.workflows.answers import answer_pairs as answer_pairs
    from attnlm.workflows.answers import generate as generate
    from attnlm.workflows.check_own_code import check as check
    from attnlm.workflows.compare import compare as compare
    from attnlm.workflows.doctor import Finding as Finding
    from attnlm.workflows.doctor import doctor as doctor
    from attnlm.workflows.estimate import Estimate as Estimate
    from attnlm.workflows.estimate import estimate as estimate
    from attnlm.workflows.evaluate import evaluate as evaluate
    from attnlm.workflows.exam import exam as exam
    from attnlm.workflows.export import export as export
    from attnlm.workflows.ladder import ladder as ladder
    from attnlm.workflows.save_run import save_run as save_run
    from attnlm.workflows.train import train as train

__version__ = "1.0.0"

_NAMES = {
    "base.errors": "AttnlmError UsageError",
    "base.events": "Note Progress",
    "base.own_code": "accept_code",
    "base.heads": "HeadEntry list_heads",
    "config.recipes": "RecipeEntry list_recipes",
    "data.batches": "Batches",
    "data.dataset": "Dataset DatasetEntry list_datasets open_dataset",
    "data.prepare": "prepare",
    "workflows.answers": "Answered answer_pairs generate",
    "workflows.check_own_code": "check",
    "workflows.compare": "compare",
    "workflows.doctor": "Finding doctor",
    "workflows.estimate": "Estimate estimate",
    "workflows.evaluate": "evaluate",
    "workflows.exam": "exam",
    "workflows.export": "export",
    "workflows.ladder": "ladder",
    "workflows.save_run": "save_run",
    "workflows.train": "train",
    "generation.sampling": "sample samples",
    "runs.hugging_face": "import_run",
    "runs.load_model": "load_model",
    "runs.manage": "RunEntry list_runs",
    "runs.run": "Run open_run",
    "see.attend": "Attention attend",
    "see.comparison": "Comparison Group",
    "see.exam_card": "Exam",
    "see.heads": "HeadsOverTraining HeadsReport heads heads_over_training",
    "see.patch": "Patching patch",
    "see.progress_bar": "ProgressBar",
    "see.report": "Report report",
    "see.trace": "Trace trace",
    "training.events": "Evaluated Finished Started Stepped",
    "training.validation": "Evaluation",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(["__version__", *_HOMES])


if not TYPE_CHECKING:  # a type checker would accept every name, with any type

    def __getattr__(name: str) -> Any:
        """Load a name when it is first used, so that `attnlm --help` does not wait for torch."""
        if name in _HOMES:
            found = getattr(importlib.import_module(f"attnlm.{_HOMES[name]}"), name)
            if name == "doctor" or not inspect.isfunction(found):  # it looks at PyTorch as it is
                return found
            return with_usual_torch_settings(found)
        raise AttributeError(f"module 'attnlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
