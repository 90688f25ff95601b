"""Train a model: a new run, a resumed run, or this process's part of a run of several processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attnlm.base import clock as command_clock
from attnlm.base.atomic_folders import FolderGoneError
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining
from attnlm.base.folders import resume_command
from attnlm.base.formatting import duration
from attnlm.base.own_code import own_traceback, take_content
from attnlm.base.settings import Setting, Settings, described, differing
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.processes import Processes, joined, restarts
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.new_run import Request, SizeCandidates, resolve_new
from attnlm.config.settings import RECORD_OF, Config, resolve
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.inspection import parameters_of
from attnlm.model.own_specs import with_defaults
from attnlm.runs.create_run import check_name_is_free, create_run
from attnlm.runs.load_model import check_tokenizer, parent_record
from attnlm.runs.manage import remove_run
from attnlm.runs.records import ParentRecord, has_same_ids
from attnlm.runs.run import Run, open_dataset_of, open_run, run_from_content
from attnlm.see.curves import FEW_STEPS, CurveDrawer
from attnlm.see.loggers import LogListener, check_tools
from attnlm.training.eval_budget import affordable_sample, affordable_tokens
from attnlm.training.loop import OnStep, fit
from attnlm.training.schedule import BudgetClock
from attnlm.training.state import SavedState, load_or_init_state, read_saved_state
from attnlm.workflows.autotune import affordable_size, autotune, choose_training_device
from attnlm.workflows.check_own_code import check_causal
from attnlm.workflows.evaluate import measure_on_whole, take_snapshot

_KERNELS = ("compile", "matmul", "attention_kernel")
_OF_THE_DEVICE = ("dtype", *_KERNELS, "threads")
_ROUNDING = ("device", *_OF_THE_DEVICE, "processes", "micro_batch_size", "recompute")
_CHANGEABLE_ON_RESUME = ("steps", "eval_every", "patience", *_ROUNDING)


@dataclass(frozen=True)
class Call:
    """What every job of a call needs: arguments of `train`, and what the call has set up."""

    checkpoint_dir: Path
    data_dir: Path
    verify: bool
    began: float
    """the `time.perf_counter` at which a budget begins"""
    processes: Processes
    on_event: OnEvent


@dataclass(frozen=True)
class _Start:
    """What a training starts with."""

    dataset: Dataset
    device: Device
    is_fresh: bool
    """True if there is no checkpoint yet"""


@dataclass(frozen=True)
class Job:
    """A run that this process has opened to train it."""

    run: Run
    start: _Start | None
    """None if the run is finished"""


OpenJob = Callable[[Call], contextlib.AbstractContextManager[Job]]


@dataclass(frozen=True)
class _Message:
    """The message of rank 0 to the other processes about the run, in JSON values."""

    path: str
    run: Mapping[str, Any]
    """the content of config.json"""
    code: Sequence[str]
    """the files with the run's own code"""
    is_fresh: bool = False
    """True if the training begins without a checkpoint"""
    is_finished: bool = False
    """True if there is nothing to train"""


def train(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | None = None,
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
    the fields of Architecture and TrainingConfig.

    `resume` continues a run; only steps, eval_every, patience and how to compute (device, dtype,
    threads, compile, …) can be changed. `start_from` begins a new run with the model of another run
    and the weights of its `checkpoint` (auto, best or last); the data must have the same tokenizer,
    and the training settings are new. With `lora`, the new run trains adapters for these weights.
    If a run called `name` exists, train raises AttnlmError; but if `exist_ok` is True, train
    returns the existing run, provided that it is finished and has this configuration and data set.
    A model with own code whose logits depend on later tokens is trained only if `force` is True.
    The hashes of large .bin files are checked in samples, or in whole if `verify` is True. `budget`
    is the time for the whole call; the learning rate and the evaluations then depend on the time
    instead of the steps.

    `on_event` is called with the events Note, Started, Stepped, Evaluated and Finished. The run's
    curve.png is redrawn at each evaluation. `on_step` is called after every step, with the number
    of steps made and the batch's loss, a tensor of shape () on the device. `log` names tools to log
    to (tensorboard, wandb, mlflow, trackio). Name them again to continue a resumed run's log.

    Raises AttnlmError (UsageError for invalid arguments). On SIGINT, SIGTERM and SIGHUP, training
    saves the last complete step and raises Interrupted, a KeyboardInterrupt. So `on_event` can stop
    training in the main thread: `signal.raise_signal(signal.SIGINT)`.
    """

    def open_job(call: Call) -> contextlib.AbstractContextManager[Job]:
        chosen = settings
        if call.processes.count > 1:
            chosen = {"processes": call.processes.count, **settings}
        if resume is not None:
            of_new = None if checkpoint == "auto" else checkpoint
            _check_with_resume(chosen, dataset, recipe, name, start_from, of_new)
            return resumed_job(call, resume, chosen)
        parent = (
            None if start_from is None else open_run(start_from, checkpoint_dir=call.checkpoint_dir)
        )
        config, candidates = resolve_new(chosen, recipe, parent)
        return new_job(
            call,
            config,
            dataset,
            candidates=candidates,
            start_from=parent,
            checkpoint=checkpoint,
            name=name,
            exist_ok=exist_ok,
            force=force,
        )

    return run_job(
        open_job,
        began=command_clock.began(),
        checkpoint_dir=checkpoint_dir,
        data_dir=data_dir,
        verify=verify,
        log=log,
        on_event=on_event,
        on_step=on_step,
    )


train.__doc__ = f"""{inspect.cleandoc(train.__doc__ or "")}

Settings; their defaults depend on the model:

{described(RECORD_OF)}
"""


def train_config(
    config: Config,
    dataset: str | Path | Dataset | None,
    *,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
    log: str | Sequence[str] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> Run:
    """Train a new run with a resolved configuration, whose budget begins now.

    `options` are passed to `new_job`.
    """
    return run_job(
        functools.partial(new_job, config=config, dataset=dataset, **options),
        began=time.perf_counter(),
        checkpoint_dir=checkpoint_dir,
        data_dir=data_dir,
        verify=verify,
        log=log,
        on_event=on_event,
    )


def run_job(
    open_job: OpenJob,
    *,
    began: float,
    checkpoint_dir: str | Path,
    data_dir: str | Path,
    verify: bool,
    log: str | Sequence[str] | None,
    on_event: OnEvent | None,
    on_step: OnStep | None = None,
) -> Run:
    """Train the run that `open_job` opens in rank 0, and return it. Other processes join the run.

    Other arguments are as in `train`. A budget counts from `began`, a value of `time.perf_counter`.
    """
    tools = [log] if isinstance(log, str) else log or ()
    check_tools(tools)
    with joined() as processes, contextlib.ExitStack() as stack:
        listener: OnEvent = ignore
        if processes.is_main:
            logs = LogListener(CurveDrawer(on_event or ignore), tools)
            listener = stack.enter_context(contextlib.closing(logs))
        stack.enter_context(torch_settings_restored())
        call = Call(
            checkpoint_dir=Path(checkpoint_dir),
            data_dir=Path(data_dir),
            verify=verify,
            began=began,
            processes=processes,
            on_event=listener,
        )
        job = stack.enter_context(open_job(call) if processes.is_main else _joined_job(call))
        run = job.run
        if job.start is None:
            return run
        state = load_or_init_state(run, job.start.device, job.start.is_fresh, processes)
        budget = run.config.training.budget
        clock = None
        if budget is not None:
            clock = BudgetClock.of((1 - state.progress) * budget, call.began)
        sample_tokens = affordable_sample(run.config, run.vocab_size)
        run = fit(
            run,
            job.start.dataset,
            state,
            on_event=listener,
            take_snapshot=functools.partial(take_snapshot, job.start.dataset, sample_tokens),
            clock=clock,
            processes=processes,
            on_step=on_step if processes.is_main else None,
        )
        if processes.is_main:
            if budget is not None and state.step < FEW_STEPS:
                steps = "1 step was" if state.step == 1 else f"{state.step} steps were"
                made = f"only {steps} made in {duration(budget)}"
                better = "use a smaller model, a smaller `batch_size` or a longer `budget`"
                listener(Note(f"{made}: {better}"))
            measure_on_whole(run, job.start.dataset, listener)
        return run


# --- A new run ------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_job(
    call: Call,
    config: Config,
    dataset: str | Path | Dataset | None,
    *,
    candidates: SizeCandidates | None = None,
    start_from: str | Path | Run | None = None,
    checkpoint: str = "auto",
    name: str | None = None,
    exist_ok: bool = False,
    force: bool = False,
) -> Iterator[Job]:
    """Create a run with this configuration, and yield its job. The arguments are as in `train`."""
    exists = name is not None and (call.checkpoint_dir / name).exists()
    if name is not None and exists and restarts():
        # The launcher has restarted the processes after a process failed.
        with resumed_job(call, call.checkpoint_dir / name, {}) as job:
            yield job
        return
    if checkpoint != "auto" and start_from is None:
        raise UsageError(
            "`checkpoint` needs `start_from`: it selects the weights of that run",
            "use both or neither",
        )
    check_launched(config.training, call.processes)
    if name is not None and not (exists and exist_ok):
        check_name_is_free(name, call.checkpoint_dir)
    opened = open_dataset(dataset, data_dir=call.data_dir, verify=call.verify)
    parent = (
        None if start_from is None else open_run(start_from, checkpoint_dir=call.checkpoint_dir)
    )
    if parent is not None and not exists:
        check_tokenizer(parent, opened)
    record = None if parent is None else parent_record(parent, checkpoint)
    request = Request(config, candidates)
    if name is not None and exists:
        yield Job(_finished_run(call, call.checkpoint_dir / name, request, opened, record), None)
        return
    leaks = check_causal(config.spec, opened.vocab_size)
    if leaks and not force:
        raise AttnlmError(
            f"{config.spec.name} is not causal: {leaks.partition(';')[0]}",
            f"{leaks.partition('; ')[2]}; or use `force`",
        )
    config, device = _complete(request, opened, call.began, call.on_event)
    with explaining(call.checkpoint_dir, ", or name another `checkpoint_dir`"):
        run = create_run(
            config,
            opened,
            parameters_of(config.spec, opened.vocab_size),
            name=name,
            checkpoint_dir=call.checkpoint_dir,
            parent=record,
            leaks=leaks,
        )
    with _removing_if_unused(run, call.checkpoint_dir), run.training_lock():
        _send(call.processes, run, is_fresh=True)
        yield Job(run, _Start(opened, device, is_fresh=True))


def _complete(
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
    config = _with_examples(config, dataset)
    device = choose_training_device(config, dataset)
    config = autotune(config, device, dataset)
    examples = dataset.train_examples
    if examples and (cut := examples.is_longer(config.spec.block_size).sum()):
        on_event(
            Note(
                f"{cut:,} of {len(examples):,} training examples are longer than the context and "
                f"are cut: `block_size` {examples.longest - 1} holds the longest"
            )
        )
    if config.training.budget is None and config.training.eval_tokens is None:
        affordable = affordable_tokens(config, dataset.vocab_size, dataset.val_tokens)
        config = config.with_training(eval_tokens=affordable)
    return config, device


def _with_examples(config: Config, dataset: Dataset) -> Config:
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
def _removing_if_unused(run: Run, folder: Path) -> Iterator[None]:
    """Remove a new run if this context fails or is interrupted before the first checkpoint.

    After an error in own code, remove it also if it has the untrained weights only.
    """
    try:
        yield
    except FolderGoneError:
        raise  # another run may be at this path
    except BaseException as error:  # own code and listeners may raise anything
        with contextlib.suppress(AttnlmError):
            is_own = own_traceback(error) is not None
            if not run.last.exists() or (is_own and read_saved_state(run).step == 0):
                remove_run(run, checkpoint_dir=folder)
        raise


def _finished_run(
    call: Call, path: Path, request: Request, dataset: Dataset, parent: ParentRecord | None
) -> Run:
    """Return the run at `path`. Raises AttnlmError if it is unfinished or not as requested."""
    run = open_run(path)
    configs = [request.config]
    if request.candidates is not None:
        configs = [resolve(request.candidates.settings, size) for size in request.candidates.sizes]
    recorded = run.config.settings()
    others = min((_differing(config, recorded, request) for config in configs), key=len)
    if not has_same_ids(dataset, run.dataset):
        others.append("data set")
    if (run.parent and run.parent.sha256) != (parent and parent.sha256):
        others.append("start_from")
    if others:
        raise AttnlmError(
            f"a run called {run.name} exists, but its `{others[0]}` differs",
            "choose another `name`",
        )
    saved = read_saved_state(run)
    patience = run.config.training.patience
    is_complete = saved.step == run.config.training.steps
    is_out_of_patience = patience is not None and saved.stale >= patience
    if saved.step != saved.evaluated_step or not (is_complete or is_out_of_patience):
        raise AttnlmError(
            f"a run called {run.name} exists, but it is not finished",
            f"resume it: {resume_command(run.path)}",
        )
    finished = "exists, is finished, and has this configuration: nothing to train"
    call.on_event(Note(f"{run.name} {finished}"))
    _send(call.processes, run, is_finished=True)
    return run


def _differing(config: Config, recorded: Settings, request: Request) -> list[str]:
    """Return the settings whose recorded values differ from `config`.

    Settings that a run chooses at its start, or with a budget in its course, do not count.
    """
    chosen = {"warmup"} if config.training.budget is not None else set()
    if request.candidates is not None:
        chosen |= {"dropout", "steps"} - request.candidates.settings.keys()
    settings = {k: v for k, v in config.settings().items() if v != "auto" and k not in chosen}
    return differing(settings, recorded)


# --- A resumed run --------------------------------------------------------------------------------


def _check_with_resume(settings: Mapping[str, Setting], *others: object) -> None:
    if any(other is not None for other in others):
        raise UsageError(
            "`resume` cannot be combined with a data set, `recipe`, `name` or `start_from`",
            "leave them out: the run has recorded its settings",
        )
    for key in settings:
        if key not in _CHANGEABLE_ON_RESUME:
            taken = ", ".join(f"`{k}`" for k in _CHANGEABLE_ON_RESUME)
            raise UsageError(
                f"`{key}` cannot be changed in a run that is resumed", f"{taken} can be changed"
            )


@contextlib.contextmanager
def resumed_job(
    call: Call, resume: str | Path | Run, settings: Mapping[str, Setting]
) -> Iterator[Job]:
    """Open a run as it was last saved, record the settings that changed, and yield its job."""
    # The run may have been trained further since it was opened.
    where = resume.path.absolute() if isinstance(resume, Run) else resume
    run = open_run(where, checkpoint_dir=call.checkpoint_dir)
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported: there is no training to resume",
            f"fine-tune it: `start_from` {run.name}",
        )
    with run.training_lock():
        config, is_changed = _changed_config(run, settings, call.on_event)
        check_launched(config.training, call.processes)
        device = choose_device(config.training.device, config.training.dtype)
        if "device" not in settings:
            device = replace(device, reason="recorded in the run")
        dataset = open_dataset_of(run, call.data_dir, verify=call.verify)
        is_fresh = not run.last.exists() and restarts() > 0  # it ended before its first checkpoint
        saved = SavedState() if is_fresh else read_saved_state(run)
        _check_steps(run, saved, config.training.steps, call.on_event)
        run = replace(run, config=autotune(config, device, dataset, is_resumed=True))
        with explaining(run.path, f", then: {resume_command(run.path)}"):
            run.keep_until(saved.evaluated_step, saved.step)
            if is_changed:
                run.save_config()
        _send(call.processes, run, is_fresh=is_fresh)
        yield Job(run, _Start(dataset, device, is_fresh))


def _changed_config(
    run: Run, settings: Mapping[str, Setting], on_event: OnEvent
) -> tuple[Config, bool]:
    """Return the run's configuration with `settings`, and True if they change it."""
    recorded = run.config.settings()
    if "device" in settings:
        settings = {**settings, "device": choose_device(str(settings["device"])).name}
    computing = {key: settings.get(key, recorded[key]) for key in ("device", "dtype")}
    if computing.items() - recorded.items():
        recorded = {k: v for k, v in recorded.items() if k not in _OF_THE_DEVICE}
        chosen = ", ".join(f"`{k}`" for k in _OF_THE_DEVICE if k not in settings)
        other = "device" if computing["device"] != recorded["device"] else "precision"
        on_event(Note(f"{chosen} are chosen again, since the run was trained on another {other}"))
    elif any(settings.get(key, recorded[key]) != recorded[key] for key in _KERNELS):
        recorded = {k: v for k, v in recorded.items() if k not in _KERNELS[1:]}  # they may not fit
    changed = {key: settings[key] for key in differing(settings, recorded)}
    for key in sorted(changed.keys() & set(_ROUNDING)):
        on_event(Note(f"`{key}` differs from the original run; results may differ by rounding"))
    return resolve(changed, recorded), bool(changed)


def _check_steps(run: Run, saved: SavedState, steps: int | None, on_event: OnEvent) -> None:
    """Raise AttnlmError if the run has already made more than `steps` steps."""
    more = f"use `steps` {2 * saved.step}, or any total above {saved.step}"
    if steps is None:
        return
    if saved.step > steps:
        raise AttnlmError(f"{run.name} has already made {saved.step} steps", more)
    planned = run.config.training.steps
    if planned is not None and steps < planned:
        on_event(Note(f"{run.name} was planned for {planned:,} steps; it now ends after {steps:,}"))
    if saved.step == saved.evaluated_step == steps:
        on_event(Note(f"{run.name} is finished; to extend it, {more}"))


# --- Several processes ----------------------------------------------------------------------------


def check_launched(training: TrainingConfig, processes: Processes) -> None:
    """Raise UsageError if the setting `processes` differs from the number of started processes."""
    if training.processes != processes.count:
        raise UsageError(
            f"`processes` is {training.processes}, but {processes.count} were started",
            f"start {training.processes} with torchrun, or use `processes` {processes.count}",
        )


def _send(processes: Processes, run: Run, **state: bool) -> None:
    """Tell the other processes what they need to know of a run."""
    for own in run.config.codes:
        own.check_accepted()  # the other processes run what they receive
    code = [own.content().decode() for own in run.config.codes]
    processes.broadcast_object(asdict(_Message(str(run.path), run.content(), code, **state)))


@contextlib.contextmanager
def _joined_job(call: Call) -> Iterator[Job]:
    """Wait for the run that rank 0 announces, and yield this process's job.

    Raises AttnlmError if the data set is missing or differs.
    """
    message = _Message(**call.processes.broadcast_object(None))
    for content in message.code:
        take_content(content.encode())
    run = run_from_content(Path(message.path), message.run)
    if message.is_finished:
        yield Job(run, None)
        return
    try:
        dataset = open_dataset_of(run, call.data_dir, verify=call.verify)
    except AttnlmError as error:
        hint = "each machine needs the same data set: copy it from the first one"
        raise AttnlmError(error.message, hint) from None
    device = choose_device(run.config.training.device, run.config.training.dtype)
    use_precision(device)
    yield Job(run, _Start(dataset, device, message.is_fresh))
