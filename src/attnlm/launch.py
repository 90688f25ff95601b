"""From settings to a run that trains: a new one, or one that goes on."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from attnlm.batches import check_length
from attnlm.caches import code_folder
from attnlm.config import (
    Config,
    Setting,
    TrainingConfig,
    described_settings,
    flag,
    load_recipe,
    resolve,
    with_steps,
)
from attnlm.curves import CurveDrawer
from attnlm.dataset import Dataset, open_dataset
from attnlm.device import Device, choose_device
from attnlm.errors import AttnlmError, UsageError
from attnlm.evaluation import validation_loss
from attnlm.events import Note, OnEvent, ignore
from attnlm.files import explaining
from attnlm.folders import command_for
from attnlm.interruption import Interruption
from attnlm.memory import check_memory
from attnlm.model import count_parameters, model_skeleton
from attnlm.moments import take_moment
from attnlm.native import COMPILATION
from attnlm.one_layer import compiled_parts, has_parts, saved_by_compiling
from attnlm.readable import duration
from attnlm.run import Run, create_run, open_dataset_of, open_run
from attnlm.threads import choose_threads
from attnlm.training import (
    Stepper,
    TrainingState,
    fit,
    initial_state,
    keeping_random_state,
    saved_state,
)

# Where PyTorch's compiler keeps what it makes, and loads it again: by itself, in a folder of the
# temporary one that anybody could have made.
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_TAKEN_BESIDE_RESUME = ("steps", "eval_every", "patience", "device", "threads", "compile")


def train(
    dataset: str | Path | Dataset | None = None,
    *,
    recipe: str | Path | None = None,
    resume: str | Path | Run | None = None,
    name: str | None = None,
    checkpoint_dir: str | Path = "checkpoints",
    data_dir: str | Path = "data",
    verify: bool = False,
    on_event: OnEvent | None = None,
    **settings: Setting,
) -> Run:
    """Trains a model on a prepared data set, and returns the run.

        run = attnlm.train("tales-char", model="transformer", steps=500, seed=1)

    `dataset` is an opened one, a name or a path; default: the one prepared last. `settings` are the
    fields of ModelConfig and TrainingConfig. With `resume` that run goes on; beside it only steps,
    eval_every, patience, device, threads and compile are taken. `verify` reads all of the data's
    bins where `open_dataset` would read samples. `on_event` is called with what happens: Note,
    Started, Stepped, Evaluated and Finished. The run's curve.png is redrawn at each evaluation.

    Raises AttnlmError (UsageError where the arguments alone are wrong). On SIGINT, SIGTERM and
    SIGHUP the last complete step is saved, then Interrupted, a KeyboardInterrupt, is raised.
    """
    on_event = CurveDrawer(on_event or ignore)
    threads = torch.get_num_threads()
    try:
        with _ready(
            dataset,
            recipe,
            resume,
            name,
            Path(checkpoint_dir),
            Path(data_dir),
            verify,
            on_event,
            settings,
        ) as (run, opened, state):
            fit(run, opened, state, on_event)
    finally:
        torch.set_num_threads(threads)
    return run


train.__doc__ = f"""{inspect.cleandoc(train.__doc__ or "")}

Settings; their defaults depend on the model (`attnlm train --model NAME --print-config`):

{described_settings()}
"""


@contextlib.contextmanager
def _ready(
    dataset: str | Path | Dataset | None,
    recipe: str | Path | None,
    resume: str | Path | Run | None,
    name: str | None,
    checkpoint_dir: Path,
    data_dir: Path,
    verify: bool,
    on_event: OnEvent,
    settings: dict[str, Setting],
) -> Iterator[tuple[Run, Dataset, TrainingState]]:
    """The run that is to be trained, its data and where it stands; nobody else trains it."""
    if resume is None:
        config = resolve(settings, load_recipe(str(recipe)) if recipe is not None else None)
        opened = open_dataset(dataset, data_dir=data_dir, verify=verify)
        run, state = _begin(config, opened, name, checkpoint_dir, on_event)
        with run.alone():
            yield run, opened, state
        return
    if dataset is not None or recipe is not None or name is not None:
        raise UsageError(
            "--resume takes everything from the run", "leave out DATASET, --recipe and --name"
        )
    if isinstance(resume, Run):
        resume = resume.path.absolute()  # it may have been trained further since it was opened
    run = open_run(resume, checkpoint_dir=checkpoint_dir)
    with run.alone():
        yield _go_on(run, data_dir, verify, settings, on_event)


def _begin(
    config: Config, dataset: Dataset, name: str | None, checkpoint_dir: Path, on_event: OnEvent
) -> tuple[Run, TrainingState]:
    """A new run's folder, and its state before the first step."""
    for key in config.dropped:
        on_event(Note(f"{config.model.model} has no use for the recipe's {key}"))
    if config.recipe_tokenizer not in (None, dataset.tokenizer.name):
        on_event(
            Note(
                f"the recipe was made for --tokenizer {config.recipe_tokenizer}, "
                f"and {dataset.name} was prepared with {dataset.tokenizer.name}"
            )
        )
    device = choose_device(config.training.device, config.training.dtype)
    parameters = check_fits(config, dataset, device)
    config = settle(config, device, dataset)
    if config.training.steps is None:
        config = replace(config, training=_planned(config, dataset, device, on_event))
    state = initial_state(config, dataset.vocab_size, device)
    with explaining(checkpoint_dir, "free some space, or name another --checkpoint-dir"):
        run = create_run(config, dataset, parameters, name=name, checkpoint_dir=checkpoint_dir)
    return run, state


def _go_on(
    run: Run, data_dir: Path, verify: bool, settings: dict[str, Setting], on_event: OnEvent
) -> tuple[Run, Dataset, TrainingState]:
    """A run as it was saved last, with its data set."""
    for key in settings:
        if key not in _TAKEN_BESIDE_RESUME:
            taken = ", ".join(flag(k) for k in _TAKEN_BESIDE_RESUME)
            raise UsageError(
                f"{flag(key)} can't be changed in a run that goes on",
                f"beside --resume only {taken} are taken",
            )
    recorded = run.config.settings()
    changed = {key: value for key, value in settings.items() if recorded.get(key) != value}
    for key in sorted(changed.keys() & {"device", "threads", "compile"}):
        on_event(Note(f"{flag(key)} is another than before: numbers may differ in rounding"))
    config = resolve(changed, recorded)
    device = choose_device(config.training.device, config.training.dtype)
    check_memory(config, run.vocab_size, run.parameters, run.dataset["val_tokens"], device)
    dataset = open_dataset_of(run, data_dir, verify=verify)
    config = settle(config, device, dataset)
    run = replace(run, config=config)
    state = saved_state(run, device)
    if state.step > (config.training.steps or 0):
        raise AttnlmError(
            f"{run.name} has made {state.step} steps already",
            f"give --steps {2 * state.step}, or any total above {state.step}",
        )
    again = command_for("attnlm train --resume", run.path)
    with explaining(run.path, f"make room, then: {again}"):
        run.keep_until(state.evaluated_step)
        if changed:
            run.save_config()
    return run, dataset, state


def settle(config: Config, device: Device, dataset: Dataset) -> Config:
    """Settles what was left open, so that the saved configuration is complete."""
    training = config.training
    decided = replace(
        training,
        seed=secrets.randbits(31) if training.seed is None else training.seed,
        device=device.name,
        dtype=device.dtype,
        compile=_compiled(config, device, dataset),
    )
    config = replace(config, training=decided)
    threads = training.threads or _chosen_threads(config, device, dataset)
    torch.set_num_threads(threads)
    return replace(config, training=replace(decided, threads=threads))


def _compiled(config: Config, device: Device, dataset: Dataset) -> str:
    """What is compiled: "on" all of a step, "parts" of it, or "off" nothing.

    Raises AttnlmError where that is asked for and there is no compiler, no folder for what it
    makes, or there are no such parts.
    """
    asked, on_cpu = config.training.compile, device.name == "cpu"
    if asked == "on" and on_cpu and not _has_compiler():
        raise AttnlmError(
            "--compile on needs a C++ compiler, and there is none",
            "install g++ or clang++, or give --compile off",
        )
    if asked == "on" and sys.platform != "win32" and not os.environ.get(_COMPILED):
        os.environ[_COMPILED] = str(code_folder())
    if asked in ("on", "off"):
        return asked
    possible = on_cpu and device.dtype == "float32" and has_parts(config, dataset.vocab_size)
    if asked == "auto":
        worth = possible and saved_by_compiling(config) > COMPILATION
        return "parts" if worth and compiled_parts(config.model) else "off"
    if not possible:
        raise UsageError(
            "--compile parts is for one-layer rungs with small heads, in float32 on a CPU",
            "give --compile off",
        )
    if not compiled_parts(config.model):
        raise AttnlmError(
            "--compile parts needs a C compiler that works, and there is none",
            "install gcc or clang, let TMPDIR name a folder that programs may be loaded from, "
            "or give --compile off",
        )
    return "parts"


def _chosen_threads(config: Config, device: Device, dataset: Dataset) -> int:
    """As many as make a step fastest, by a trial whose weights are thrown away."""
    if device.name != "cpu" or config.training.compile == "on":
        return torch.get_num_threads()
    trial = replace(config, training=with_steps(config.training, 2**30))
    training = config.training
    parameters = count_parameters(model_skeleton(config.model, dataset.vocab_size))
    work = 6 * parameters * training.batch_size * config.model.block_size
    about = [
        *(asdict(config.model), dataset.vocab_size),
        *(training.batch_size, training.optimizer, training.compile),
    ]
    stepper: list[Stepper] = []

    def step() -> None:
        if not stepper:  # made only where a trial is needed
            state = initial_state(trial, dataset.vocab_size, device)
            stepper.append(Stepper(state, trial, dataset))
        stepper[0].step(Interruption())

    with keeping_random_state(device):
        return choose_threads(work, about, step)


def _has_compiler() -> bool:
    return any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "c++")))


def check_fits(config: Config, dataset: Dataset, device: Device) -> int:
    """How many parameters the model has, which fits.

    Raises AttnlmError where the data are too short for the context, or memory for the training.
    """
    hint = f"give --block-size {dataset.largest_block_size} or less, or prepare a longer text"
    check_length(dataset.train_tokens, config.model.block_size, "training", hint)
    check_length(dataset.val_tokens, config.model.block_size, "validation", hint)
    parameters = count_parameters(model_skeleton(config.model, dataset.vocab_size))
    check_memory(config, dataset.vocab_size, parameters, dataset.val_tokens, device)
    return parameters


# Of the budget: what the trial of speed may take, and what evaluations may take.
TRIAL_SHARE, _EVALUATION_SHARE = 0.03, 0.15


@dataclass(frozen=True)
class Pace:
    """Seconds that a training step and an evaluation take, of one run or of several together."""

    step: float
    evaluation: float

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.step + other.step, self.evaluation + other.evaluation)


def _planned(config: Config, dataset: Dataset, device: Device, on_event: OnEvent) -> TrainingConfig:
    """Turns a budget into steps, by the speed of a trial whose weights are thrown away."""
    budget = config.training.budget
    assert budget is not None
    began = time.perf_counter()
    pace = measure_pace(config, dataset, device, TRIAL_SHARE * budget)
    planned = plan(config.training, pace, budget - (time.perf_counter() - began))
    fit = "one step fits" if planned.steps == 1 else f"{planned.steps:,} steps fit"
    on_event(
        Note(
            f"{fit} into {duration(budget)}: one takes {duration(pace.step)}, "
            f"an evaluation {duration(pace.evaluation, 2)}"
        )
    )
    if planned.warmup < config.training.warmup:
        on_event(Note(f"they are fewer than the warm-up's {config.training.warmup}, which is cut"))
    return planned


def measure_pace(config: Config, dataset: Dataset, device: Device, at_most: float) -> Pace:
    """The pace of a run, by about `at_most` seconds of steps and one evaluation, thrown away."""
    trial = replace(config, training=with_steps(config.training, 2**30))
    state = initial_state(trial, dataset.vocab_size, device)
    with keeping_random_state(device):
        stepping = _seconds_per_step(Stepper(state, trial, dataset), at_most)
    return Pace(stepping, _seconds_of_evaluation(state, dataset, config.training.compile))


def plan(training: TrainingConfig, pace: Pace, seconds: float) -> TrainingConfig:
    """As many steps as `seconds` hold at that pace, and evaluations that take a small share.

    A warm-up is no longer than they are.
    """
    seconds = max(0.0, seconds)
    if training.eval_every is not None:
        steps = max(1, int(seconds / (pace.step + pace.evaluation / training.eval_every)))
    else:
        evaluations = min(10, max(1, int(_EVALUATION_SHARE * seconds / pace.evaluation)))
        steps = max(1, int((seconds - (evaluations + 1) * pace.evaluation) / pace.step))
        training = replace(training, eval_every=math.ceil(steps / evaluations))
    return with_steps(replace(training, warmup=min(training.warmup, steps)), steps)


def _seconds_of_evaluation(state: TrainingState, dataset: Dataset, compile: str) -> float:
    began = time.perf_counter()
    validation_loss(state.model, dataset.val, state.device, bytes_per_token=1.0, compile=compile)
    take_moment(state.step, state.model, dataset, state.device)
    return time.perf_counter() - began


def _seconds_per_step(stepper: Stepper, at_most: float) -> float:
    """Measured after a few steps of warm-up, over `at_most` seconds or at least three steps."""
    interruption = Interruption()
    for _ in range(3):
        stepper.step(interruption).item()
    began, first = time.perf_counter(), stepper.state.step
    while stepper.state.step < first + 3 or time.perf_counter() - began < at_most:
        stepper.step(interruption).item()
    return (time.perf_counter() - began) / (stepper.state.step - first)
