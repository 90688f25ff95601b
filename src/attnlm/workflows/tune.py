"""Find the best value of a training setting for each rung of a ladder, by short trainings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import workspace
from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.base.own_code import own_traceback
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.data.dataset import Dataset
from attnlm.model.language_model import OwnOutputError
from attnlm.runs.ladder_plan import LadderPlan, Trial
from attnlm.training.recorded import NotRecordedError
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.train import train

_TRIAL_FRACTION = 0.2  # of the steps, or of the time of one seed, for each value


def run_trials(
    path: Path,
    plan: LadderPlan,
    dataset: Dataset,
    durations: Mapping[str, float],
    on_event: OnEvent,
) -> LadderPlan:
    """Return the plan with all trials of the setting `tune`, after making those that it lacks.

    Each trial is written to the plan in the ladder's folder `path`. `durations` are the expected
    durations of a run of each rung, in any unit.
    """
    held_out = _with_held_out(dataset)
    for rung in plan.rungs:
        share = _TRIAL_FRACTION * durations[rung] / sum(durations.values()) / (1 + plan.seeds)
        tried = [trial.value for trial in plan.trials if trial.rung == rung]
        values = plan.grid(rung)
        untried = [value for value in values if value not in tried]
        for value in untried:
            settings = {**plan.settings(rung, plan.seed), str(plan.tune): value}
            steps: Any = settings.get("steps")
            if steps is not None:
                steps = max(1, round(steps * _TRIAL_FRACTION))
            else:  # the rung's first trial has a budget, and the others make as many steps
                made = (trial.steps for trial in plan.trials if trial.rung == rung)
                steps = next(filter(None, made), None)
            if steps is None:
                settings["budget"] = share * (plan.budget or 0)
            else:
                settings |= {"steps": steps, "eval_every": steps}
            trial, result = _run_trial(path, rung, value, settings, held_out, on_event)
            plan = replace(plan, trials=(*plan.trials, trial))
            plan.write(path)
            on_event(Note(f"tried {rung} with {plan.tune} {value:g}: {result}"))
        best = plan.settings(rung, plan.seed).get(str(plan.tune))
        if untried and best in (max(values), min(values)):
            end = "largest" if best == max(values) else "smallest"
            on_event(Note(f"{rung} prefers {plan.tune} {best:g}, the {end} value that was tried"))
    return plan


def _run_trial(
    path: Path,
    rung: str,
    value: float,
    settings: Settings,
    dataset: Dataset,
    on_event: OnEvent,
) -> tuple[Trial, str]:
    """Train a rung with `settings` in a temporary folder; return the trial, and it in words."""

    def pass_notes(event: object) -> None:
        if isinstance(event, Note):  # not the headers and evaluations of each trial
            on_event(event)

    with workspace(path) as folder:
        try:
            run = train(dataset, recipe=settings, checkpoint_dir=folder, on_event=pass_notes)
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            return Trial(rung, value, None), reason_of_failure(error, settings)
        last = run.evaluations()[-1]
        return Trial(rung, value, last.val_loss, last.step), f"loss {last.val_loss:.4f}"


def reason_of_failure(error: Exception, settings: Settings) -> str:
    """Return why a training failed: it diverged, or its own code raised `error`, or is not what the
    run recorded. Any other error is raised again. `settings` are those of the training.
    """
    if (lines := own_traceback(error)) is not None:
        return f"its code raised {lines.splitlines()[-1]}"
    if isinstance(error, NotRecordedError | OwnOutputError) or (
        isinstance(error, AttnlmError) and isinstance(error.__cause__, StepNotFiniteError)
    ):
        return error.message
    if isinstance(error, RuntimeError) and resolve({}, settings).codes:  # in the backward pass
        return f"computing with its code raised {type(error).__name__}: {error}"
    raise error


def _with_held_out(dataset: Dataset) -> Dataset:
    """Return a data set of the training split alone, whose last tenth is for validation."""
    first = dataset.train_tokens - dataset.train_tokens // 10
    examples: dict[str, Any] = {}
    if dataset.train_examples is not None:
        before, after = dataset.train_examples.divide_at(len(dataset.train_examples) * 9 // 10)
        examples = {"train_examples": before, "val_examples": after}
        first = len(before.is_answer)
    return replace(
        dataset,
        train=dataset.train[:first],
        val=dataset.train[first:],
        train_tokens=first,
        val_tokens=dataset.train_tokens - first,
        **examples,
    )
