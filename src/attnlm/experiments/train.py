"""From settings to a run that trains: a new one, or one that is resumed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlm.base import clock
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining
from attnlm.base.folders import resume_command
from attnlm.base.readable import duration
from attnlm.base.settings import Setting
from attnlm.base.workspaces import FolderGoneError
from attnlm.compute.choices import keeping_threads
from attnlm.compute.device import Device, choose_device
from attnlm.compute.processes import ALONE, LostProcessError, Processes, joined, restarts
from attnlm.config.new_training import resolve_new
from attnlm.config.settings import Config, described_settings, resolve
from attnlm.data.dataset import Dataset, open_dataset
from attnlm.experiments.affordable_size import affordable_size
from attnlm.experiments.other_processes import begun_before, check_alike, check_launched, join, tell
from attnlm.experiments.settle import settle
from attnlm.experiments.snapshot import passage_texts, take_snapshot
from attnlm.experiments.whole_split import measure_on_whole
from attnlm.model.language_model import LanguageModel
from attnlm.runs.create_run import check_free, create_run
from attnlm.runs.open_run import open_dataset_of, open_run
from attnlm.runs.parent import check_tokenizer, parent_record
from attnlm.runs.remove import remove_run
from attnlm.runs.run import Run
from attnlm.runs.ticker import Snapshot
from attnlm.see.curves import CurveDrawer
from attnlm.see.log_listener import LogListener
from attnlm.see.log_tools import check_tools
from attnlm.training.loop import fit
from attnlm.training.price import affordable_sample, affordable_tokens
from attnlm.training.schedule import Clock
from attnlm.training.state import begun_state, saved_facts

_ROUNDING = (
    *("device", "threads", "compile", "matmul", "attention_kernel"),
    *("processes", "micro_batch_size", "recompute"),
)
_FEW_STEPS = 10  # teach a model next to nothing
_OF_THE_DEVICE = ("dtype", "compile", "matmul", "attention_kernel", "threads")
_TAKEN_BESIDE_RESUME = ("steps", "eval_every", "patience", *_ROUNDING)


def train(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | None = None,
    resume: str | Path | Run | None = None,
    start_from: str | Path | Run | None = None,
    checkpoint: str = "auto",
    name: str | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
    log: str | Sequence[str] | None = None,
    on_event: OnEvent | None = None,
    **settings: Setting,
) -> Run:
    """Trains a model on a prepared data set, and returns the run.

        run = attnlm.train("tales-char", model="transformer", steps=500, seed=1)

    `dataset` is an opened one, a name or a path; default: the one prepared last. `settings` are the
    fields of Architecture and TrainingConfig. `resume` continues that run; only steps, eval_every,
    patience, device, threads and compile can be given with it. `start_from` takes the model of
    another run and the weights of its `checkpoint` (auto, best or last): a new run, with data of
    the same tokenizer and a training of its own; with `lora` it trains adapters of them. `verify`
    reads all of the data's bins where `open_dataset` would read samples. `on_event` is called with
    what happens: Note, Started, Stepped, Evaluated and Finished. The run's curve.png is
    redrawn at each evaluation.
    `log` names tools that follow too: tensorboard, wandb, mlflow, trackio; a resumed run goes on
    with those that it had, unless others are given. A `budget` is for the whole call: the learning
    rate and the evaluations follow the clock.

    Raises AttnlmError (UsageError for invalid arguments). On SIGINT, SIGTERM and
    SIGHUP the last complete step is saved, then Interrupted, a KeyboardInterrupt, is raised. So
    `on_event` can stop a training in the main thread: `signal.raise_signal(signal.SIGINT)`.
    """
    began = clock.began()
    log = [log] if isinstance(log, str) else log
    check_tools(log or ())
    if checkpoint != "auto" and start_from is None:
        raise UsageError(
            "`checkpoint` says which weights of `start_from` are taken", "give both, or neither"
        )
    with joined() as processes:
        if processes.count > 1:
            settings = {"processes": processes.count, **settings}
            is_new, named = resume is start_from is None, None if recipe is None else str(recipe)
            resolved = resolve_new(settings, named)[0].settings() if is_new else settings
            check_alike(processes, resolved, named, resume, start_from)
        if not processes.is_main:
            return join(processes, Path(data_dir), verify)
        if (before := begun_before(processes)) is not None:
            dataset = recipe = name = start_from = None
            resume, settings = before, {}
        if resume is None:
            parent = weights = None
            if start_from is not None:
                parent = open_run(start_from, checkpoint_dir=checkpoint_dir)
                weights = parent.config.model, parent.name
            named = None if recipe is None else str(recipe)
            config, sizes = resolve_new(settings, named, weights)
            check_launched(config.training, processes)
            if name is not None:
                check_free(name, Path(checkpoint_dir))
            opened = open_dataset(dataset, data_dir=data_dir, verify=verify)
            record = None
            if parent is not None:
                check_tokenizer(parent, opened)
                record = parent_record(parent, checkpoint)
            expected = None
            if len(sizes) > 1:
                chosen = affordable_size(sizes, settings, opened, began, on_event or ignore)
                config, expected = chosen
            about = name, checkpoint_dir, on_event, began, processes
            return begin_run(config, opened, *about, record, log or (), expected)
        _check_beside_resume(settings, dataset, recipe, name, start_from)
        # It may have been trained further since it was opened.
        where = resume.path.absolute() if isinstance(resume, Run) else resume
        run = open_run(where, checkpoint_dir=checkpoint_dir)
        with _training(on_event, log) as listener, run.alone():
            resumed = _resume(run, Path(data_dir), verify, settings, listener)
            check_launched(resumed[0].config.training, processes)
            return _fitted(*resumed, listener, began, processes)


def begin_run(
    config: Config,
    dataset: Dataset,
    name: str | None,
    checkpoint_dir: str | Path,
    on_event: OnEvent | None,
    began: float,
    processes: Processes = ALONE,
    parent: Mapping[str, Any] | None = None,
    log: Sequence[str] = (),
    expected_steps: float | None = None,
) -> Run:
    """Trains a new run; its weights start from those of its `parent`, if it has one.

    A budget counts from `began`. `expected_steps`: how many a trial promised, if there was one.
    """
    with _training(on_event, log) as listener:
        run, device = _begin(config, dataset, name, Path(checkpoint_dir), parent, listener)
        try:
            with run.alone():
                about = listener, began, processes, expected_steps
                return _fitted(run, dataset, device, True, *about)
        except FolderGoneError:
            raise  # another run may be at this path
        except (AttnlmError, LostProcessError, KeyboardInterrupt):
            with contextlib.suppress(AttnlmError):
                if not run.last.exists():  # it ended before there was anything to resume
                    remove_run(run, checkpoint_dir=checkpoint_dir)
            raise


@contextlib.contextmanager
def _training(on_event: OnEvent | None, log: Sequence[str] | None) -> Iterator[OnEvent]:
    """Draws the curve of what is trained meanwhile, and lets the tools named in `log` follow it;
    afterwards the threads are as before."""
    listening = contextlib.closing(LogListener(CurveDrawer(on_event or ignore), log))
    with keeping_threads(), listening as listener:
        yield listener


def _fitted(
    run: Run,
    dataset: Dataset,
    device: Device,
    fresh: bool,
    on_event: OnEvent,
    began: float,
    processes: Processes,
    expected_steps: float | None = None,
) -> Run:
    tell(run, fresh, processes)
    state = begun_state(run, device, fresh, processes)
    tokens = affordable_sample(run.config, run.vocab_size)
    taking = functools.partial(_snapshot, dataset, tokens)
    budget, clock = run.config.training.budget, None
    if budget is not None:
        clock = Clock.of((1 - state.progress) * budget, began)
        clock.expected_steps = expected_steps
    run = fit(run, dataset, state, on_event, taking, clock, processes)
    if budget is not None and state.step < _FEW_STEPS:
        made = f"only {state.step} steps were made in {duration(budget)}"
        on_event(Note(f"{made}: a smaller model or `batch_size`, or more time, gives a better one"))
    measure_on_whole(run, dataset, on_event)
    return run


train.__doc__ = f"""{inspect.cleandoc(train.__doc__ or "")}

Settings; their defaults depend on the model:

{described_settings()}
"""


def _begin(
    config: Config,
    dataset: Dataset,
    name: str | None,
    checkpoint_dir: Path,
    parent: Mapping[str, Any] | None,
    on_event: OnEvent,
) -> tuple[Run, Device]:
    """A new run's folder, and where it is trained."""
    for key in config.dropped:
        on_event(
            Note(f"ignoring the recipe's {key}: it does not apply to this {config.model.model}")
        )
    if config.recipe_tokenizer not in (None, dataset.tokenizer.name):
        on_event(
            Note(
                f"the recipe was made for `tokenizer` {config.recipe_tokenizer}, "
                f"and {dataset.name} was prepared with {dataset.tokenizer.name}"
            )
        )
    device = choose_device(config.training.device, config.training.dtype)
    config, parameters, _ = settle(config, device, dataset)
    if config.training.budget is None and config.training.eval_tokens is None:
        affordable = affordable_tokens(config, dataset.vocab_size, dataset.val_tokens)
        config = replace(config, training=replace(config.training, eval_tokens=affordable))
    with explaining(checkpoint_dir, ", or name another `checkpoint_dir`"):
        run = create_run(
            config, dataset, parameters, name=name, checkpoint_dir=checkpoint_dir, parent=parent
        )
    return run, device


def _check_beside_resume(settings: Mapping[str, Setting], *others: object) -> None:
    if any(other is not None for other in others):
        raise UsageError(
            "`resume` takes everything from the run",
            "leave out the data set, `recipe`, `name` and `start_from`",
        )
    for key in settings:
        if key not in _TAKEN_BESIDE_RESUME:
            taken = ", ".join(f"`{k}`" for k in _TAKEN_BESIDE_RESUME)
            raise UsageError(
                f"`{key}` can't be changed in a run that is resumed", f"{taken} can be changed"
            )


def _resume(
    run: Run, data_dir: Path, verify: bool, settings: Mapping[str, Setting], on_event: OnEvent
) -> tuple[Run, Dataset, Device, bool]:
    """A run as it was saved last, its data set, where it is trained, and whether it begins anew."""
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported: there is no training to resume", "train a new run"
        )
    recorded = run.config.settings()
    if "device" in settings:
        name = choose_device(str(settings["device"])).name
        settings = {**settings, "device": name}
        if name != recorded["device"]:
            recorded = {k: v for k, v in recorded.items() if k not in _OF_THE_DEVICE}
            chosen = ", ".join(f"`{k}`" for k in _OF_THE_DEVICE if k not in settings)
            on_event(Note(f"{chosen} are chosen anew, since the run was trained on another device"))
    changed = {key: value for key, value in settings.items() if recorded.get(key) != value}
    for key in sorted(changed.keys() & set(_ROUNDING)):
        on_event(Note(f"`{key}` differs from the original run; results may differ by rounding"))
    config = resolve(changed, recorded)
    planned, total = run.config.training.steps, config.training.steps
    if planned is not None and total is not None and total < planned:
        on_event(Note(f"{run.name} was planned for {planned:,} steps; it ends after {total:,} now"))
    device = choose_device(config.training.device, config.training.dtype)
    if "device" not in settings:
        device = replace(device, reason="recorded in the run")
    dataset = open_dataset_of(run, data_dir, verify=verify)
    config = settle(config, device, dataset, is_resumed=True).config
    run = replace(run, config=config)
    fresh = not run.last.exists() and restarts() > 0  # it ended before it was saved
    saved = {"step": 0, "evaluated_step": -1} if fresh else saved_facts(run)
    step, evaluated_step = saved["step"], saved["evaluated_step"]
    more = f"give `steps` {2 * step}, or any total above {step}"
    if total is not None and step > total:
        raise AttnlmError(f"{run.name} has made {step} steps already", more)
    if step == evaluated_step == total:
        on_event(Note(f"{run.name} is finished; to extend it, {more}"))
    again = resume_command(run.path)
    with explaining(run.path, f", then: {again}"):
        run.keep_until(evaluated_step)
        if changed:
            run.save_config()
    return run, dataset, device, fresh


def _snapshot(
    dataset: Dataset, tokens: int, step: int, model: LanguageModel, device: Device
) -> tuple[Snapshot, list[str]]:
    """A snapshot of the model, and the tokens that its maps are of."""
    snapshot = take_snapshot(step, model, dataset, device, tokens)
    return snapshot, passage_texts(model, dataset)
