"""Train a model: a new run, a resumed run, or this process's part of a run of several processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import workspace
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.files import explaining_os_errors
from attnlm.base.folders import check_name
from attnlm.base.formatting import duration
from attnlm.base.own_code import own_traceback
from attnlm.base.setting_fields import describe_settings
from attnlm.compute.device import Device
from attnlm.config.new_run import Request, resolve_new
from attnlm.config.settings import RECORD_OF, Config
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.inspection import parameter_count
from attnlm.model.own_specs import with_defaults
from attnlm.runs.create_run import check_name_is_free, create_run
from attnlm.runs.load_model import check_tokenizer, parent_record
from attnlm.runs.records import ParentRecord
from attnlm.runs.run import Run, open_run
from attnlm.see.curves import FEW_STEPS
from attnlm.training.eval_budget import affordable_eval_tokens
from attnlm.training.loop import OnStep, fit
from attnlm.training.state import read_saved_state
from attnlm.workflows.autotune import (
    affordable_size,
    autotune,
    check_context,
    choose_training_device,
)
from attnlm.workflows.check_own_code import check_causal
from attnlm.workflows.evaluate import measure_on_whole, take_snapshot
from attnlm.workflows.job import (
    Job,
    TrainCall,
    announce,
    check_launched,
    joined_job,
    open_call,
    start_job,
)
from attnlm.workflows.resume import check_resume, finished_run, resumed_job


def train(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | Mapping[str, Any] | None = None,
    resume: str | Path | Run | None = None,
    start_from: str | Path | Run | None = None,
    checkpoint: str = "auto",
    name: str | None = None,
    exist_ok: bool = False,
    force: bool = False,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
    log: str | Sequence[str] | None = None,
    on_event: OnEvent | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
) -> Run:
    """Train a model on a prepared data set, and return the run.

        run = attnlm.train("tales-char", model="transformer", steps=500, seed=1)

    `dataset` is an open data set, a name or a path; default: the last prepared one. `settings` are
    the fields of Architecture and TrainingConfig. They override the settings of `recipe`: a name, a
    path, or a dictionary such as `run.config.settings()`.

    `resume` continues a run; only steps, eval_every, patience and how to compute (device, dtype,
    threads, compile, …) can be changed. `start_from` begins a new run with the model of another run
    and the weights of its `checkpoint` (auto, best or last); the data must have the same tokenizer,
    and the training settings are new. If a run called `name` exists, train raises AttnlmError; but
    if `exist_ok` is True, train returns the existing run, provided that it is finished and has this
    configuration and data set.
    A model with own code whose logits depend on later tokens is trained only if `force` is True.
    The hashes of .bin files over 1 GiB are checked only if `verify` is True. `budget`
    is the time for the whole call; the learning rate and the evaluations then depend on the time
    instead of the steps.

    `on_event` is called with the events Note, Started, Stepped, Evaluated and Finished. The run's
    curve.png is redrawn at each evaluation. `on_step` is called after every step, with the number
    of steps made and the batch's loss, a tensor of shape () on the device. `log` names tools to log
    to (tensorboard, wandb, trackio). Name them again to continue a resumed run's log.

    Raises AttnlmError (UsageError for invalid arguments). On SIGINT, SIGTERM and SIGHUP, training
    saves the last complete step and raises Interrupted, a KeyboardInterrupt. So `on_event` can stop
    training in the main thread: `signal.raise_signal(signal.SIGINT)`.
    """
    with open_call(checkpoint_dir, data_dir, verify, log, on_event) as call:
        processes = call.processes
        if processes.count > 1:
            settings = {"processes": processes.count, **settings}
        opening: contextlib.AbstractContextManager[Job | Run]
        if not processes.is_main:
            opening = joined_job(call)
        elif resume is not None:
            check_resume(
                settings,
                dataset=dataset,
                recipe=recipe,
                name=name,
                start_from=start_from,
                checkpoint=checkpoint,
                exist_ok=exist_ok,
                force=force,
            )
            opening = resumed_job(call, resume, settings)
        else:
            parent = None
            if start_from is not None:
                parent = open_run(start_from, checkpoint_dir=call.checkpoint_dir)
            request = resolve_new(settings, recipe, parent)
            opening = new_job(call, request, dataset, parent, checkpoint, name, exist_ok, force)
        with opening as job:
            if isinstance(job, Run):  # a finished run, which `exist_ok` accepts
                return job
            run = fit(
                job.run,
                job.dataset,
                job.state,
                on_event=call.on_event,
                take_snapshot=functools.partial(take_snapshot, job.dataset, job.sample_tokens),
                clock=job.clock,
                processes=processes,
                on_step=on_step if processes.is_main else None,
            )
            if processes.is_main:
                if run.config.codes:
                    run = open_run(run.path)  # what it computes no longer changes with a notebook
                budget = run.config.training.budget
                steps = job.state.step
                if budget is not None and steps < FEW_STEPS:
                    made = "1 step was" if steps == 1 else f"{steps} steps were"
                    better = "use a smaller model, a smaller `batch_size` or a longer `budget`"
                    call.on_event(Note(f"only {made} made in {duration(budget)}: {better}"))
                measure_on_whole(run, job.dataset, call.on_event)
            return run


train.__doc__ = f"""{inspect.cleandoc(train.__doc__ or "")}

Settings; their defaults depend on the model:

{describe_settings(RECORD_OF)}
"""


@contextlib.contextmanager
def new_job(
    call: TrainCall,
    request: Request,
    dataset: str | Path | Dataset | None,
    parent: Run | None,
    checkpoint: str,
    name: str | None,
    exist_ok: bool,
    force: bool,
) -> Iterator[Job | Run]:
    """Create a run, and yield its job; or yield the finished run that `exist_ok` accepts.

    `parent` is the run to start from. Other arguments are as in `train`.
    """
    existing = None
    if name is not None:
        check_name(name)
        existing = path if (path := call.checkpoint_dir / name).exists() else None
    if checkpoint != "auto" and parent is None:
        raise UsageError(
            "`checkpoint` needs `start_from`: it selects the weights of that run",
            "use both or neither",
        )
    check_launched(request.config.training, call.processes)
    if name is not None and not (existing and exist_ok):
        check_name_is_free(name, call.checkpoint_dir)
    opened = open_dataset(dataset, data_dir=call.data_dir, verify=call.verify)
    if parent is not None and existing is None:
        check_tokenizer(parent, opened)
        check_context(request.config, opened, is_fixed=True)
    record = None if parent is None else parent_record(parent, checkpoint)
    if existing is not None:
        run = finished_run(existing, request, opened, record)
        has_all = "exists, is finished, and has this configuration: nothing to train"
        call.on_event(Note(f"{run.name} {has_all}"))
        announce(call.processes, run, is_finished=True)
        yield run
        return
    run, device = _create_run(call, request, opened, record, name, force)
    with _removing_if_unused(run), run.training_lock():
        announce(call.processes, run, is_fresh=True)
        yield start_job(call, run, opened, device, is_fresh=True)


def _create_run(
    call: TrainCall,
    request: Request,
    dataset: Dataset,
    parent: ParentRecord | None,
    name: str | None,
    force: bool,
) -> tuple[Run, Device]:
    """Return a new run with a complete configuration, and the device to train on."""
    leaks = refuse_leaks(request.config, dataset.vocab_size, force)
    config, device = complete_config(request, dataset, call.began, call.on_event)
    with explaining_os_errors(call.checkpoint_dir, ", or name another `checkpoint_dir`"):
        run = create_run(
            config,
            dataset,
            parameter_count(config.spec, dataset.vocab_size),
            name=name,
            checkpoint_dir=call.checkpoint_dir,
            parent=parent,
            leaks=leaks,
        )
    return run, device


def refuse_leaks(config: Config, vocab_size: int, force: bool) -> str:
    """Return how the model's logits depend on later tokens; "" if they don't.

    Raises AttnlmError if they do, unless `force` is True.
    """
    leaks = check_causal(config.spec, vocab_size)
    if leaks and not force:
        leak, _, remedy = leaks.partition("; ")
        raise AttnlmError(f"{config.spec.name} is not causal: {leak}", f"{remedy}; or use `force`")
    return leaks


def complete_config(
    request: Request, dataset: Dataset, began: float, on_event: OnEvent
) -> tuple[Config, Device]:
    """Return the complete configuration of a new run, and the device to train on."""
    config = request.config
    if request.candidates is not None:
        config = affordable_size(request.candidates, dataset, began, on_event)
        config = replace(config, spec=with_defaults(config.spec))
    model = config.spec.name
    for key in config.dropped:
        on_event(Note(f"ignoring the recipe's {key}: it does not apply to this {model}"))
    if config.recipe_tokenizer not in (None, dataset.tokenizer.name):
        made_for = f"the recipe was made for `tokenizer` {config.recipe_tokenizer}"
        other = f"{dataset.name} was prepared with {dataset.tokenizer.name}"
        on_event(Note(f"{made_for}, but {other}"))
    config = _with_loss_on(config, dataset)
    device = choose_training_device(config, dataset)
    config = autotune(config, device, dataset)
    examples = dataset.train_examples
    if examples and (cut := examples.is_longer(config.spec.block_size).sum()):
        on_event(
            Note(
                f"{cut:,} of {len(examples):,} training examples are longer than the context and "
                f"are cut: a model with `block_size` {examples.longest - 1} holds the longest"
            )
        )
    if config.training.budget is None and config.training.eval_tokens is None:
        affordable = affordable_eval_tokens(config, dataset.vocab_size, dataset.val_tokens)
        config = config.with_training(eval_tokens=affordable)
    return config, device


def _with_loss_on(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with `loss_on` for this data set. Raises UsageError."""
    training = config.training
    if dataset.examples is not None:
        return config.with_training(loss_on=training.loss_on or "answers")
    for name in ("loss_on", "best_by", "examples_per_window"):
        if getattr(training, name) not in (None, "all", "loss"):
            raise UsageError(
                f"`{name}` {getattr(training, name)} needs questions with answers, which "
                f"{dataset.name} lacks",
                "prepare a task, such as addition, or records with `prompt_column`",
            )
    return config


@contextlib.contextmanager
def _removing_if_unused(run: Run) -> Iterator[None]:
    """Remove a new run if this context fails or is interrupted before the first checkpoint.

    After an error in own code, remove it also if it has the untrained weights only.
    """
    try:
        yield
    except BaseException as error:  # own code and listeners may raise anything
        with contextlib.suppress(AttnlmError, OSError):
            is_own = own_traceback(error) is not None
            if not run.last.exists() or (is_own and read_saved_state(run).step == 0):
                # One rename removes it. If killed here, the next command deletes the leftovers.
                with workspace(run.path.parent) as work:
                    run.path.rename(work / "removed")
        raise
