"""Train a model: a new run, a resumed run, or this process's part of a run of several processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attnlm.base import clock
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining
from attnlm.base.folders import resume_command
from attnlm.base.readable import duration
from attnlm.base.settings import Setting, described
from attnlm.base.workspaces import FolderGoneError
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.processes import LostProcessError, Processes, joined, restarts
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.new_training import Resolved, resolve_new
from attnlm.config.settings import RECORD_OF, resolve
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.model.inspection import parameters_of
from attnlm.runs.create_run import check_free, create_run
from attnlm.runs.load_model import check_tokenizer, parent_record
from attnlm.runs.manage import remove_run
from attnlm.runs.run import Run, open_dataset_of, open_run, run_of
from attnlm.see.curves import CurveDrawer
from attnlm.see.logs import LogListener, check_tools
from attnlm.training.cost import affordable_sample, affordable_tokens
from attnlm.training.loop import OnStep, fit
from attnlm.training.memory import estimate_memory
from attnlm.training.schedule import Clock
from attnlm.training.state import load_or_init_state, saved_facts
from attnlm.workflows.autotune import affordable_size, autotune, chosen_device
from attnlm.workflows.evaluate import measure_on_whole, take_snapshot

_ROUNDING = (
    *("device", "dtype", "threads", "compile", "matmul", "attention_kernel"),
    *("processes", "micro_batch_size", "recompute"),
)
_FEW_STEPS = 10  # with fewer, a model learns next to nothing
_KERNELS = ("compile", "matmul", "attention_kernel")
_OF_THE_DEVICE = ("dtype", *_KERNELS, "threads")
_CHANGEABLE_ON_RESUME = ("steps", "eval_every", "patience", *_ROUNDING)


def train(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | Resolved | None = None,
    resume: str | Path | Run | None = None,
    start_from: str | Path | Run | None = None,
    checkpoint: str = "auto",
    name: str | None = None,
    exist_ok: bool = False,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
    log: str | Sequence[str] | None = None,
    on_event: OnEvent | None = None,
    on_step: OnStep | None = None,
    **settings: Setting,
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
    began, folder = clock.began(), Path(checkpoint_dir)
    log = [log] if isinstance(log, str) else log
    check_tools(log or ())
    if checkpoint != "auto" and start_from is None:
        raise UsageError(
            "`checkpoint` needs `start_from`: it selects the weights of that run",
            "use both or neither",
        )
    with joined() as processes, contextlib.ExitStack() as meanwhile:
        if processes.count > 1:
            settings = {"processes": processes.count, **settings}
            is_new = resume is start_from is None
            options = resolve_new(settings, recipe).config.settings() if is_new else settings
            _check_alike(processes, options, recipe, resume, start_from)
        if not processes.is_main:
            return _join(processes, Path(data_dir), verify)
        if restarts() and name is not None and (folder / name).exists():
            # The launcher has restarted the processes after one of them failed.
            resume, settings = folder / name, {}
            dataset = recipe = name = start_from = None
        on_event = CurveDrawer(on_event or ignore)
        listener = meanwhile.enter_context(contextlib.closing(LogListener(on_event, log)))
        meanwhile.enter_context(torch_settings_restored())
        if resume is None:
            parent = None if start_from is None else open_run(start_from, checkpoint_dir=folder)
            asked = resolve_new(settings, recipe, parent)
            check_launched(asked.config.training, processes)
            began = asked.began or began
            if name is not None and not (exist_ok and (folder / name).exists()):
                check_free(name, folder)
            opened = open_dataset(dataset, data_dir=data_dir, verify=verify)
            if name is not None and (folder / name).exists():
                try:
                    run = _existing(open_run(folder / name), asked, opened, parent, listener)
                except AttnlmError as error:
                    processes.broadcast_object({"refused": (error.message, error.hint)})
                    raise
                processes.broadcast_object({"finished": str(run.path)})
                return run
            run, device = _begin(asked, opened, name, folder, parent, checkpoint, began, listener)
            fresh = True
            meanwhile.enter_context(_removing_if_unused(run, folder))
            meanwhile.enter_context(run.alone())
        else:
            _check_beside_resume(settings, dataset, recipe, name, start_from)
            # The run may have been trained further since it was opened.
            where = resume.path.absolute() if isinstance(resume, Run) else resume
            run = open_run(where, checkpoint_dir=folder)
            meanwhile.enter_context(run.alone())
            resumed = _resume(run, Path(data_dir), verify, settings, processes, listener)
            run, opened, device, fresh = resumed
        told = {"path": str(run.path), "run": run.content(), "fresh": fresh}
        processes.broadcast_object(told)  # `_join` awaits it
        state = load_or_init_state(run, device, fresh, processes)
        tokens = affordable_sample(run.config, run.vocab_size)
        taking = functools.partial(take_snapshot, opened, tokens)
        sizes = run.vocab_size, run.parameters, opened.val_tokens
        memory = estimate_memory(run.config, *sizes, device.name).total
        budget, time_left = run.config.training.budget, None
        if budget is not None:
            time_left = Clock.of((1 - state.progress) * budget, began)
        run = fit(
            *(run, opened, state, listener, taking, time_left, processes),
            memory=memory,
            on_step=on_step,
        )
        if budget is not None and state.step < _FEW_STEPS:
            made = f"only {state.step} steps were made in {duration(budget)}"
            better = "use a smaller model, a smaller `batch_size` or a longer `budget`"
            listener(Note(f"{made}: {better}"))
        measure_on_whole(run, opened, listener)
        return run


train.__doc__ = f"""{inspect.cleandoc(train.__doc__ or "")}

Settings; their defaults depend on the model:

{described(RECORD_OF)}
"""


def _begin(
    asked: Resolved,
    dataset: Dataset,
    name: str | None,
    folder: Path,
    parent: Run | None,
    checkpoint: str,
    began: float,
    on_event: OnEvent,
) -> tuple[Run, Device]:
    """Complete the configuration of a new run, make its folder, and return the run."""
    config, record = asked.config, None
    if parent is not None:
        check_tokenizer(parent, dataset)
        record = parent_record(parent, checkpoint)
    if len(asked.sizes) > 1:
        config = affordable_size(asked.sizes, asked.settings, dataset, began, on_event)
    model = config.spec.name
    for key in config.dropped:
        on_event(Note(f"ignoring the recipe's {key}: it does not apply to this {model}"))
    if config.recipe_tokenizer not in (None, dataset.tokenizer.name):
        made_for = f"the recipe was made for `tokenizer` {config.recipe_tokenizer}"
        other = f"{dataset.name} was prepared with {dataset.tokenizer.name}"
        on_event(Note(f"{made_for}, but {other}"))
    device = chosen_device(config, dataset)
    config = autotune(config, device, dataset)
    if config.training.budget is None and config.training.eval_tokens is None:
        affordable = affordable_tokens(config, dataset.vocab_size, dataset.val_tokens)
        config = config.with_training(eval_tokens=affordable)
    parameters = parameters_of(config.spec, dataset.vocab_size)
    with explaining(folder, ", or name another `checkpoint_dir`"):
        run = create_run(
            config, dataset, parameters, name=name, checkpoint_dir=folder, parent=record
        )
    return run, device


@contextlib.contextmanager
def _removing_if_unused(run: Run, folder: Path) -> Iterator[None]:
    """Remove a new run if this context fails or is interrupted before the first checkpoint."""
    try:
        yield
    except FolderGoneError:
        raise  # another run may be at this path
    except (AttnlmError, LostProcessError, KeyboardInterrupt):
        with contextlib.suppress(AttnlmError):
            if not run.last.exists():
                remove_run(run, checkpoint_dir=folder)
        raise


def _existing(
    run: Run, asked: Resolved, dataset: Dataset, parent: Run | None, on_event: OnEvent
) -> Run:
    """Return the existing run. Raises AttnlmError if it is unfinished or not as requested."""
    wanted = {k: v for k, v in asked.config.settings().items() if v != "auto"}
    if "budget" in wanted:
        wanted.pop("warmup", None)  # a run with a budget may have shortened the warmup
    recorded = run.config.settings()
    differing = [key for key, value in wanted.items() if recorded.get(key) != value]
    if run.dataset.train_sha256 != dataset.train_sha256:
        differing.append("data set")
    if (run.parent and run.parent.name) != (parent and parent.name):
        differing.append("start_from")
    if differing:
        raise AttnlmError(
            f"a run called {run.name} exists, but its `{differing[0]}` differs",
            "choose another `name`",
        )
    facts, training = saved_facts(run), run.config.training
    patient = training.patience is None or facts.stale < training.patience
    if facts.step != facts.evaluated_step or (patient and facts.step != training.steps):
        raise AttnlmError(
            f"a run called {run.name} exists, but it is not finished",
            f"resume it: {resume_command(run.path)}",
        )
    on_event(Note(f"{run.name} exists, is finished, and has this configuration: nothing to train"))
    return run


def _check_beside_resume(settings: Mapping[str, Setting], *others: object) -> None:
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


def _resume(
    run: Run,
    data_dir: Path,
    verify: bool,
    settings: Mapping[str, Setting],
    processes: Processes,
    on_event: OnEvent,
) -> tuple[Run, Dataset, Device, bool]:
    """Return a run as it was last saved, ready to train; record the settings that changed.

    The last value is True if the training begins without a checkpoint.
    """
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported: there is no training to resume",
            f"fine-tune it: `start_from` {run.name}",
        )
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
    changed = {key: value for key, value in settings.items() if recorded.get(key) != value}
    for key in sorted(changed.keys() & set(_ROUNDING)):
        on_event(Note(f"`{key}` differs from the original run; results may differ by rounding"))
    config = resolve(changed, recorded)
    check_launched(config.training, processes)
    planned, total = run.config.training.steps, config.training.steps
    device = choose_device(config.training.device, config.training.dtype)
    if "device" not in settings:
        device = replace(device, reason="recorded in the run")
    dataset = open_dataset_of(run, data_dir, verify=verify)
    run = replace(run, config=autotune(config, device, dataset, is_resumed=True))
    fresh = not run.last.exists() and restarts() > 0  # the run ended before its first checkpoint
    saved = None if fresh else saved_facts(run)
    step = 0 if saved is None else saved.step
    evaluated_step = -1 if saved is None else saved.evaluated_step
    more = f"use `steps` {2 * step}, or any total above {step}"
    if total is not None and step > total:
        raise AttnlmError(f"{run.name} has already made {step} steps", more)
    if planned is not None and total is not None and total < planned:
        on_event(Note(f"{run.name} was planned for {planned:,} steps; it now ends after {total:,}"))
    if step == evaluated_step == total:
        on_event(Note(f"{run.name} is finished; to extend it, {more}"))
    with explaining(run.path, f", then: {resume_command(run.path)}"):
        run.keep_until(evaluated_step)
        if changed:
            run.save_config()
    return run, dataset, device, fresh


# --- Several processes ----------------------------------------------------------------------------


def check_launched(training: TrainingConfig, processes: Processes) -> None:
    """Raise UsageError if the setting `processes` differs from the number of started processes."""
    if training.processes != processes.count:
        raise UsageError(
            f"`processes` is {training.processes}, but {processes.count} were started",
            f"start {training.processes} with torchrun, or use `processes` {processes.count}",
        )


def _check_alike(processes: Processes, *options: object) -> None:
    """Raise UsageError in every process if any process has other options than the main process."""
    text = json.dumps(options, sort_keys=True, default=str)
    ours = hashlib.sha256(text.encode()).hexdigest()
    differing = torch.tensor(float(processes.broadcast_object(ours) != ours))
    processes.all_reduce(differing)
    if differing:
        raise UsageError(
            f"{int(differing)} of {processes.count} processes differ in options from the first",
            "start all processes with the same options, version of attnlm, and recipe",
        )


def _join(processes: Processes, data_dir: Path, verify: bool) -> Run:
    """Do this process's part of the training that the main process has begun.

    Emit no events and write no files. Raises AttnlmError as `fit` does, and if the data set is
    missing or differs.
    """
    told = processes.broadcast_object(None)
    if "refused" in told:
        raise AttnlmError(*told["refused"])
    if "finished" in told:
        return open_run(told["finished"])
    run = run_of(Path(told["path"]), told["run"])
    try:
        dataset = open_dataset_of(run, data_dir, verify=verify)
    except AttnlmError as error:
        hint = "each machine needs the same data set: copy it from the first one"
        raise AttnlmError(error.message, hint) from None
    device = choose_device(run.config.training.device, run.config.training.dtype)
    with torch_settings_restored():
        use_precision(device)
        state = load_or_init_state(run, device, told["fresh"], processes)
        return fit(run, dataset, state, ignore, processes=processes)
