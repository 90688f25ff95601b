"""Train a list of runs: those that are finished are taken, and others are resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from attnlm.base.events import Note, OnEvent
from attnlm.base.own_code import OwnCodeError, own_traceback
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.train import train


def train_all(
    trainings: Mapping[str, Settings],
    dataset: Dataset,
    folder: Path,
    on_event: OnEvent,
    title: str = "",
) -> dict[str, Run]:
    """Train a run for each of `trainings`, which has the settings by the run's name in `folder`.

    A finished run of this name and these settings is taken, and an unfinished one is resumed. A
    Note with `title`, if given, and the seed comes before each run. Raises AttnlmError as `train`
    does.
    """
    runs = {}
    for name, settings in trainings.items():
        if title:
            on_event(Note(f"{title}, seed {settings['seed']}"))
        runs[name] = train(
            dataset,
            recipe=settings,
            name=name,
            exist_ok=True,
            checkpoint_dir=folder,
            on_event=on_event,
        )
    return runs


@contextlib.contextmanager
def noting_failures(name: str, settings: Settings, on_event: OnEvent) -> Iterator[list[str]]:
    """Send events that say why a training failed, as `reason_of_failure` does; the list gets the
    reason. `settings` are the training's."""
    reasons: list[str] = []
    try:
        yield reasons
    except Exception as error:  # noqa: BLE001 - own code may raise anything
        reasons.append(reason_of_failure(error, settings))
        for line in (own_traceback(error) or "").splitlines():
            on_event(Note(line))
        on_event(Note(f"{name} failed: {reasons[0]}"))


def reason_of_failure(error: Exception, settings: Settings) -> str:
    """Return why a training failed: it diverged, or its own code raised `error`, or is not causal,
    or not what the run recorded. Any other error is raised again. `settings` are the training's.
    """
    if (lines := own_traceback(error)) is not None:
        return f"its code raised {lines.splitlines()[-1]}"
    if isinstance(error, OwnCodeError | StepNotFiniteError):
        return error.message
    if isinstance(error, RuntimeError) and resolve({}, settings).codes:  # in the backward pass
        return f"computing with its code raised {type(error).__name__}: {error}"
    raise error
