"""From seconds to steps: the pace of a training, measured, and what fits into a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from attnlm.base.events import Note, OnEvent
from attnlm.base.readable import duration
from attnlm.base.signals import Interruption
from attnlm.compute.device import Device
from attnlm.config.settings import Config, TrainingConfig, with_steps
from attnlm.data.dataset import Dataset
from attnlm.experiments.snapshot import take_snapshot
from attnlm.training.state import TrainingState, initial_state, keeping_random_state
from attnlm.training.step import Stepper
from attnlm.training.validation import validation_loss

# Of the budget: what the trial of speed may take, and what evaluations may take.
TRIAL_SHARE, _EVALUATION_SHARE = 0.03, 0.15


@dataclass(frozen=True)
class Pace:
    """Seconds that a training step and an evaluation take, of one run or of several together."""

    step: float
    evaluation: float

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.step + other.step, self.evaluation + other.evaluation)


def planned(config: Config, dataset: Dataset, device: Device, on_event: OnEvent) -> TrainingConfig:
    """Turns a budget into steps, by the speed of a trial whose weights are thrown away."""
    budget = config.training.budget
    assert budget is not None
    began = time.perf_counter()
    pace = measure_pace(config, dataset, device, TRIAL_SHARE * budget)
    planned = plan(config.training, pace, budget - (time.perf_counter() - began))
    takes = f"a step takes {duration(pace.step)}, an evaluation {duration(pace.evaluation, 2)}"
    if planned.steps == 1:
        smaller = "one step is made; better a smaller model or a longer `budget`"
        on_event(Note(f"this model is too large for {duration(budget)}: {takes}; {smaller}"))
    else:
        on_event(Note(f"{planned.steps:,} steps fit into {duration(budget)}: {takes}"))
    if planned.warmup < config.training.warmup:
        on_event(Note(f"warm-up shortened to {planned.warmup:,} steps"))
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
    take_snapshot(state.step, state.model, dataset, state.device)
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
