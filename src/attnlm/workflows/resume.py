"""Open a run that exists: to resume its training, or because it is finished."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.files import explaining_os_errors
from attnlm.base.folders import resume_command
from attnlm.base.setting_fields import Setting, Settings, differing_names
from attnlm.compute.device import Device, choose_device
from attnlm.config.new_run import Request
from attnlm.config.settings import Config, resolve
from attnlm.data.dataset import Dataset
from attnlm.runs.records import ParentRecord, has_same_ids
from attnlm.runs.run import Run, open_dataset_of, open_run
from attnlm.training.state import SavedState, read_saved_state
from attnlm.workflows.autotune import autotune, missing_form
from attnlm.workflows.job import Job, TrainCall, announce, check_launched, start_job

_OF_THE_DEVICE = ("dtype", "compile", "threads")
_ROUNDING = ("device", *_OF_THE_DEVICE, "processes", "micro_batch_size", "recompute")
_CHANGEABLE = ("steps", "eval_every", "patience", *_ROUNDING)


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


def open_saved_run(resume: str | Path | Run, checkpoint_dir: str | Path) -> Run:
    """Open a run as it was last saved. Raises AttnlmError if it was imported."""
    # The run may have been trained further since it was opened.
    where = resume.path.absolute() if isinstance(resume, Run) else resume
    run = open_run(where, checkpoint_dir=checkpoint_dir)
    if run.imported_from:
        raise AttnlmError(
            f"{run.name} was imported: there is no training to resume",
            f"fine-tune it: `start_from` {run.name}",
        )
    return run


@contextlib.contextmanager
def resumed_job(
    call: TrainCall, resume: str | Path | Run, settings: Mapping[str, Setting]
) -> Iterator[Job]:
    """Open a run as it was last saved, record the settings that changed, and yield its job."""
    run = open_saved_run(resume, call.checkpoint_dir)
    with run.training_lock():
        saved = read_saved_state(run)
        rest = open_rest(run, saved, settings, call.data_dir, call.verify, call.on_event)
        check_launched(rest.config.training, call.processes)
        run = replace(run, config=rest.config)
        with explaining_os_errors(run.path, f", then: {resume_command(run.path)}"):
            run.discard_after(saved.evaluated_step, saved.step)
            if rest.is_changed:
                run.save_config()
        announce(call.processes, run)
        yield start_job(call, run, rest.dataset, rest.device, is_fresh=False)


class Rest(NamedTuple):
    """What a resumed run trains with, from its saved step on."""

    config: Config
    """complete, with the settings that changed"""
    device: Device
    dataset: Dataset
    is_changed: bool
    """True if a setting changed"""


def open_rest(
    run: Run,
    saved: SavedState,
    settings: Mapping[str, Setting],
    data_dir: str | Path,
    verify: bool,
    on_event: OnEvent,
) -> Rest:
    """Return what the run, saved as `saved`, trains with if `settings` change. Writes nothing."""
    config, is_changed = _changed_config(run, settings, on_event)
    device = choose_device(config.training.device, config.training.dtype)
    if "device" not in settings:
        device = replace(device, reason="recorded in the run")
    dataset = open_dataset_of(run, Path(data_dir), verify=verify)
    _check_steps(run, saved, config.training.steps, on_event)
    missing = missing_form(config, device, dataset.vocab_size)
    if missing is not None and "compile" not in settings:
        on_event(Note(f"{missing.message}: the modules compute from now on"))
        config, is_changed = config.with_training(compile="modules"), True
    config = autotune(config, device, dataset, is_resumed=True)
    return Rest(config, device, dataset, is_changed)


def _changed_config(
    run: Run, settings: Mapping[str, Setting], on_event: OnEvent
) -> tuple[Config, bool]:
    """Return the run's configuration with `settings`, and True if they change it."""
    recorded = run.config.settings()
    computing = {key: settings.get(key, recorded[key]) for key in ("device", "dtype")}
    if computing.keys() & settings.keys():
        chosen_device = choose_device(str(computing["device"]), str(computing["dtype"]))
        computing = {"device": chosen_device.name, "dtype": chosen_device.dtype}
        settings = {k: computing.get(k, v) for k, v in settings.items()}
    if computing.items() - recorded.items():
        recorded = {k: v for k, v in recorded.items() if k not in _OF_THE_DEVICE}
        chosen = ", ".join(f"`{k}`" for k in _OF_THE_DEVICE if k not in settings)
        other = "device" if computing["device"] != recorded["device"] else "precision"
        on_event(Note(f"{chosen} are chosen again, since the run was trained on another {other}"))
    changed = {key: settings[key] for key in differing_names(settings, recorded)}
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


def finished_run(
    path: Path, request: Request, dataset: Dataset, parent: ParentRecord | None
) -> Run:
    """Return the run at `path`. Raises AttnlmError if it is unfinished or not as requested."""
    run = open_run(path)
    configs = [request.config]
    if request.candidates is not None:
        configs = [resolve(request.candidates.settings, size) for size in request.candidates.sizes]
    recorded = run.config.settings()
    changed = min((_differing_settings(config, recorded, request) for config in configs), key=len)
    if not has_same_ids(dataset, run.dataset):
        changed.append("data set")
    if (run.parent and run.parent.sha256) != (parent and parent.sha256):
        changed.append("start_from")
    if changed:
        raise AttnlmError(
            f"a run called {run.name} exists, but its `{changed[0]}` differs",
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
    return run


def _differing_settings(config: Config, recorded: Settings, request: Request) -> list[str]:
    """Return the settings whose recorded values differ from `config`.

    Settings that a run chooses at its start, or with a budget in its course, do not count.
    """
    chosen = {"warmup"} if config.training.budget is not None else set()
    if request.candidates is not None:
        chosen |= {"dropout", "steps"} - request.candidates.settings.keys()
    settings = {k: v for k, v in config.settings().items() if v != "auto" and k not in chosen}
    return differing_names(settings, recorded)
