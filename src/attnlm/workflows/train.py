"""Train a model: a new run, a resumed run, or this process's part of a run of several processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from attnlm.base import process
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import delete_folder, explaining_os_errors, workspace
from attnlm.base.folders import CHECKPOINT_DIR, DATA_DIR, check_name, resume_command
from attnlm.base.own_code import allow_call, check_not_running, own_traceback
from attnlm.base.setting_fields import Setting, describe_settings, differing_names
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.processes import Processes, join_processes
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.settings import RECORD_OF, Config, Request, resolve, resolve_new
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.spec import parameter_count
from attnlm.runs.create_run import check_name_is_free, create_run
from attnlm.runs.load_model import check_tokenizer, parent_record
from attnlm.runs.records import CheckpointFacts, ParentRecord, has_same_ids
from attnlm.runs.run import Run, open_run
from attnlm.see.curves import CurveDrawer
from attnlm.see.loggers import LogListener, check_tools
from attnlm.training.loop import OnStep, fit
from attnlm.training.recorded import check_recorded
from attnlm.training.schedule import budget_end
from attnlm.training.state import load_or_init_state
from attnlm.workflows.autotune import autotune, check_context, complete_config, missing_form
from attnlm.workflows.check_own_code import NotCausalError, check_causality
from attnlm.workflows.evaluate import measure_on_whole, take_snapshot

_OF_THE_DEVICE = ("dtype", "compile", "threads")
_ROUNDING = ("device", *_OF_THE_DEVICE, "processes", "micro_batch_size")
_CHANGEABLE = ("steps", "eval_every", "keep_every", "patience", *_ROUNDING)


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
    checkpoint_dir: str | Path = CHECKPOINT_DIR,
    data_dir: str | Path = DATA_DIR,
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

    `resume` continues a run; only steps, eval_every, keep_every, patience and how to compute
    (device, dtype, threads, compile, …) can be changed. `start_from` begins a new run with the
    model of another run and the weights of its `checkpoint` (auto, best, last or a kept step); the
    data must have the same tokenizer, and the training settings are new. If a run called `name`
    exists, train raises AttnlmError; but if `exist_ok` is True and the run has this configuration
    and data set, train returns it if it is finished, and resumes it if not.
    A model with own code whose logits depend on later tokens is trained only if `force` is True.
    `budget`
    is the time for the whole call; the learning rate and the evaluations then depend on the time
    instead of the steps.

    `on_event` is called with the events Note, Started, Stepped, Evaluated and Finished. The run's
    curve.png is redrawn at each evaluation. `on_step` is called after every step, with the number
    of steps made and the batch's loss, a tensor of shape () on the device. `log` names tools to log
    to (tensorboard, wandb, trackio), in a list or separated by commas. Name them again to continue
    a resumed run's log.

    Raises AttnlmError (UsageError for invalid arguments). On SIGINT, SIGTERM and SIGHUP, training
    saves the last complete step and raises Interrupted, a KeyboardInterrupt. So `on_event` can stop
    training in the main thread: `signal.raise_signal(signal.SIGINT)`.
    """
    check_not_running()
    began = process.budget_start()
    tools = [name.strip() for name in log.split(",")] if isinstance(log, str) else log or ()
    check_tools(tools)
    with join_processes() as processes, contextlib.ExitStack() as stack:
        listener: OnEvent = ignore
        if processes.is_main:
            logs = LogListener(CurveDrawer(on_event or ignore), tools)
            listener = stack.enter_context(contextlib.closing(logs))
        stack.enter_context(torch_settings_restored())
        call = _Call(Path(checkpoint_dir), Path(data_dir), began, processes, listener, stack)
        if processes.count > 1:
            settings = {"processes": processes.count, **settings}
        if not processes.is_main:
            job = _received_job(call)
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
            job = _resumed_job(call, open_saved_run(resume, checkpoint_dir, data_dir), settings)
        else:
            parent = None
            if start_from is not None:
                parent = open_run(start_from, checkpoint_dir=checkpoint_dir)
            request = resolve_new(settings, recipe, parent)
            job = _new_job(call, request, dataset, parent, checkpoint, name, exist_ok, force)
        if processes.is_main:
            announce(processes, job)
        return job.run if job.work is None else _trained(call, job, *job.work, on_step)


train.__doc__ = f"""{inspect.cleandoc(train.__doc__ or "")}

Settings; their defaults depend on the model:

{describe_settings(RECORD_OF)}
"""


# --- A call, and what it trains -------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What every job of a call of `train` needs: arguments, and what the call has set up."""

    checkpoint_dir: Path
    data_dir: Path
    began: float
    """the `time.perf_counter` at which a budget begins"""
    processes: Processes
    on_event: OnEvent
    """the listener of rank 0, which also draws the curve and logs; the others' does nothing"""
    until_end: contextlib.ExitStack
    """holds the lock of the run until the call ends"""


class Job(NamedTuple):
    """A run that this process has opened to train it."""

    run: Run
    work: tuple[Dataset, Device] | None
    """what it trains on; None for a finished run, which `exist_ok` accepts"""
    is_fresh: bool
    """True if there is no checkpoint yet"""


def _trained(
    call: _Call, job: Job, dataset: Dataset, device: Device, on_step: OnStep | None
) -> Run:
    """Train the run of a job to its end, and return it as it is then."""
    run, processes, training = job.run, call.processes, job.run.config.training
    use_precision(device)
    state = load_or_init_state(run, device, job.is_fresh, processes)
    if processes.is_main:  # with the weights and on the device of step 1
        check_recorded(run.config, state.model, device)
    ends = None
    if training.budget is not None:
        ends = budget_end((1 - state.progress) * training.budget, call.began)
    run = fit(
        run,
        dataset,
        state,
        on_event=call.on_event,
        take_snapshot=functools.partial(take_snapshot, dataset),
        ends=ends,
        processes=processes,
        on_step=on_step if processes.is_main else None,
    )
    if not processes.is_main:
        return run
    if run.config.codes:
        # What it computes no longer changes with a notebook.
        run = open_run(run.path.absolute(), data_dir=run.data_dir)
    measure_on_whole(run, dataset, call.on_event)
    return run


def announce(processes: Processes, job: Job) -> None:
    """Tell the other processes what they need to know of a job."""
    run = job.run
    for own in run.config.codes:  # the other processes run what they receive
        own.check_call(run.config.arguments_of(own))
    if processes.count > 1:
        code = [(own.name, own.content()) for own in run.config.codes]
        run = open_run(run.path.absolute(), data_dir=run.data_dir)  # as they would find it
        processes.broadcast_object((run, code, job.is_fresh, job.work is None))


def _received_job(call: _Call) -> Job:
    """Wait for the job that rank 0 announces, and return this process's part of it.

    Raises AttnlmError if the data set is missing or differs.
    """
    run, code, is_fresh, is_finished = call.processes.broadcast_object(None)
    for name, content in code:
        allow_call(content, name)
    if is_finished:
        return Job(run, None, is_fresh)
    dataset = run.open_dataset()
    device = choose_device(run.config.training.device, run.config.training.dtype)
    return Job(run, (dataset, device), is_fresh)


def _check_launched(training: TrainingConfig, processes: Processes) -> None:
    """Raise UsageError if the setting `processes` differs from the number of started processes."""
    if training.processes != processes.count:
        raise UsageError(
            f"`processes` is {training.processes}, but {processes.count} were started",
            f"start {training.processes} with torchrun, or use `processes` {processes.count}",
        )


# --- A new run ------------------------------------------------------------------------------------


def _new_job(
    call: _Call,
    request: Request,
    dataset: str | Path | Dataset | None,
    parent: Run | None,
    checkpoint: str,
    name: str | None,
    exist_ok: bool,
    force: bool,
) -> Job:
    """Create a run and return its job; `parent` is the run to start from, the rest as in `train`.

    With `exist_ok`, return the job of the run called `name`, if there is one.
    """
    if checkpoint != "auto" and parent is None:
        raise UsageError(
            "`checkpoint` needs `start_from`: it selects the weights of that run",
            "use both or neither",
        )
    _check_launched(request.config.training, call.processes)
    is_there = False
    if name is not None:
        check_name(name)
        is_there = exist_ok and (call.checkpoint_dir / name).is_dir()
        if not is_there:
            check_name_is_free(name, call.checkpoint_dir)
    data = open_dataset(dataset, data_dir=call.data_dir)
    record = None if parent is None else parent_record(parent, checkpoint)
    if is_there and (job := _job_of_same(call, str(name), request, data, record)):
        return job
    config, device, leaks = new_config(request, data, parent, force, call.began, call.on_event)
    run = create_run(
        config,
        data,
        parameter_count(config.spec, data.vocab_size),
        name=name,
        checkpoint_dir=call.checkpoint_dir,
        data_dir=call.data_dir,
        parent=record,
        leaks=leaks,
    )
    call.until_end.enter_context(_removing_if_unused(run))
    call.until_end.enter_context(run.training_lock())
    return Job(run, (data, device), is_fresh=True)


def new_config(
    request: Request,
    dataset: Dataset,
    parent: Run | None,
    force: bool,
    began: float,
    on_event: OnEvent,
) -> tuple[Config, Device, str]:
    """Return the complete configuration of a new run, the device to train on, and how the model's
    logits depend on later tokens; "" if they don't.

    Raises as `check_causality` and `complete_config` do, and AttnlmError if the tokenizer is not
    that of `parent`.
    """
    if parent is not None:
        check_tokenizer(parent, dataset)
        check_context(request.config, dataset, is_fixed=True)
    try:
        leaks = check_causality(request.config, dataset.vocab_size, force)
    except NotCausalError as error:
        name = request.config.spec.name
        raise NotCausalError(name, error.leak, "; or use `force`") from None
    return *complete_config(request, dataset, began, on_event), leaks


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
            if not run.last.exists() or (is_own and run.facts(run.last).step == 0):
                # One rename removes it. If killed here, the next command deletes the leftovers.
                with workspace(run.path.parent) as work:
                    run.path.rename(work / "removed")
        raise


# --- A run that exists ----------------------------------------------------------------------------


def check_resume(settings: Mapping[str, Setting], **of_new_runs: object) -> None:
    """Raise UsageError for arguments of `train` that a resumed run cannot have."""
    for name, value in of_new_runs.items():
        if value not in (None, False) and (name, value) != ("checkpoint", "auto"):
            argument = "a data set" if name == "dataset" else f"`{name}`"
            raise UsageError(
                f"`resume` cannot be combined with {argument}",
                "leave it out: the run has recorded its data set and settings",
            )
    for key in settings:
        if key not in _CHANGEABLE:
            changeable = ", ".join(f"`{name}`" for name in _CHANGEABLE)
            raise UsageError(
                f"`{key}` cannot be changed in a run that is resumed",
                f"{changeable} can be changed",
            )


def open_saved_run(
    resume: str | Path | Run, checkpoint_dir: str | Path, data_dir: str | Path
) -> Run:
    """Open a run as it was last saved. Raises AttnlmError if it was imported."""
    # The run may have been trained further since it was opened.
    where = resume.path.absolute() if isinstance(resume, Run) else resume
    run = open_run(where, checkpoint_dir=checkpoint_dir, data_dir=data_dir)
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported: there is no training to resume",
            f"fine-tune it: `start_from` {run.name}",
        )
    return run


def _job_of_same(
    call: _Call, name: str, request: Request, dataset: Dataset, parent: ParentRecord | None
) -> Job | None:
    """Return the job of the run called `name`: to resume it, or nothing if it is finished.

    A run that saved nothing is deleted, and the result is None. Raises AttnlmError if the run is
    damaged, or if it has other settings, data or initial weights than requested. Settings that a
    run chooses at its start, or with a budget in its course, may differ.
    """
    run = open_run(name, checkpoint_dir=call.checkpoint_dir)
    wanted = request.config.settings()
    if request.config.training.budget is not None:
        del wanted["warmup"]
    if len(request.sizes) > 1:  # it has chosen one of them
        first, *others = request.sizes
        fixed = {k for k, v in first.items() if all(other.get(k) == v for other in others)}
        wanted = {k: v for k, v in wanted.items() if k in fixed | request.settings.keys()}
    wanted = {key: value for key, value in wanted.items() if value != "auto"}
    changed = differing_names(wanted, run.config.settings())
    if not has_same_ids(dataset, run.dataset):
        changed.append("data set")
    if (run.parent and run.parent.sha256) != (parent and parent.sha256):
        changed.append("start_from")
    if changed:
        raise AttnlmError(
            f"a run called {name} exists, but its `{changed[0]}` differs", "choose another `name`"
        )
    if run.is_finished:
        run.evaluations_until(run.facts(run.last).step)  # raises if some are missing
        call.on_event(Note(f"{name} is finished, and has this configuration: nothing to train"))
        return Job(run, None, is_fresh=False)
    if run.last.exists():
        return _resumed_job(call, run, {}, dataset)
    if run.kept_steps() or (run.best.exists() and run.facts(run.best).step):
        raise AttnlmError(
            f"{run.last} is missing, so that {name} cannot be resumed",
            "choose another `name`, or copy the file back",
        )
    with run.training_lock():  # no other process trains it
        delete_folder(run.path)  # nothing was saved yet: start again
    return None


def _resumed_job(
    call: _Call, run: Run, settings: Mapping[str, Setting], dataset: Dataset | None = None
) -> Job:
    """Lock a run, record the settings that changed, and return its job.

    Of `dataset`, an open data set with the run's ids, the run records the path if its own is gone.
    """
    call.until_end.enter_context(run.training_lock())
    saved = run.facts(run.last)
    config, dataset, device = open_rest(run, saved, settings, dataset, call.on_event)
    _check_launched(config.training, call.processes)
    with explaining_os_errors(run.path, f", then: {resume_command(run.path)}"):
        run.discard_after(saved.evaluated_step, saved.step)
        facts = run.dataset
        if not Path(facts.path).exists():
            facts = replace(facts, path=str(dataset.path.absolute()))
        if (config, facts) != (run.config, run.dataset):
            run = replace(run, config=config, dataset=facts)
            run.save_config()
    return Job(run, (dataset, device), is_fresh=False)


def open_rest(
    run: Run,
    saved: CheckpointFacts,
    settings: Mapping[str, Setting],
    dataset: Dataset | None,
    on_event: OnEvent,
) -> tuple[Config, Dataset, Device]:
    """Return what the run, saved as `saved`, trains with if `settings` change. Writes nothing.

    On another device or with another precision, what depends on it is chosen again.
    """
    recorded = run.config.settings()
    name = str(settings.get("device", recorded["device"]))
    is_moved = name != recorded["device"]
    dtype = settings.get("dtype", "auto" if is_moved else recorded["dtype"])
    device = choose_device(name, str(dtype))
    computing = {"device": device.name, "dtype": device.dtype}
    settings = {key: computing.get(key, value) for key, value in settings.items()}
    if differing_names(computing, recorded):
        recorded = {k: v for k, v in recorded.items() if k not in _OF_THE_DEVICE}
        again = ", ".join(f"`{key}`" for key in _OF_THE_DEVICE if key not in settings)
        on_event(Note(f"{again} are chosen again: the run had another device or precision"))
    changed = {key: settings[key] for key in differing_names(settings, recorded)}
    if other := ", ".join(f"`{key}`" for key in _ROUNDING if key in changed):
        on_event(Note(f"results may differ by rounding from the original run: {other} changed"))
    config = resolve(changed, recorded)
    if "device" not in settings:
        device = replace(device, reason="recorded in the run")
    dataset = dataset or run.open_dataset()
    steps = config.training.steps
    more = f"use `steps` {2 * saved.step}, or any total above {saved.step}"
    if steps is not None and saved.step > steps:
        raise AttnlmError(f"{run.name} has already made {saved.step} steps", more)
    if saved.step == saved.evaluated_step == steps:
        on_event(Note(f"{run.name} is finished; to extend it, {more}"))
    missing = missing_form(config, device, dataset.vocab_size)
    if missing is not None and "compile" not in settings:
        on_event(Note(f"{missing.message}: the modules compute from now on"))
        config = config.with_training(compile="modules")
    return autotune(config, device, dataset, on_event, is_resumed=True), dataset, device
