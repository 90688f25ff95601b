"""A budget is kept: steps and learning rate follow the clock, and are recorded to be repeated."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.signals import Interrupted
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.config.stages import Stage, parsed_stages, written
from attnlm.data.dataset import Dataset
from attnlm.experiments import budget as budgets
from attnlm.runs.run import Run
from attnlm.training.deadline import Deadline, Pace
from attnlm.training.events import Evaluated, Replanned
from attnlm.training.schedule import learning_rate_factor
from attnlm.training.state import initial_state
from attnlm.training.step import Stepper
from tests.clock import Clock

SMALL: dict[str, Any] = {"block_size": 8, "batch_size": 4, "seed": 1, "device": "cpu", "threads": 1}


def factors(**settings: Any) -> list[float]:
    training = resolve({"warmup": 4, "schedule": "linear", **settings}).training
    assert training.steps is not None
    return [learning_rate_factor(step, training) for step in range(training.steps)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("cooldown", [0.5, 1.0])
def test_a_learning_rate_that_is_planned_again_never_jumps_and_ends_low(
    schedule: str, cooldown: float
) -> None:
    how: dict[str, Any] = {"schedule": schedule, "cooldown": cooldown}
    planned = factors(steps=100, **how)
    slower = factors(steps=60, stages="0:100,40:60", **how)
    twice = factors(steps=70, stages="0:100,10:20,14:70", **how)
    assert slower[:41] == planned[:41] and twice[:11] == planned[:11]
    for found in (slower, twice):
        assert max(abs(a - b) for a, b in itertools.pairwise(found)) < 0.3
        assert found[4:] == sorted(found[4:], reverse=True)
        assert found[-1] < 0.1
    assert factors(steps=100, stages="0:100", **how) == planned


def test_what_was_planned_before_does_not_change_by_what_is_planned_later() -> None:
    before = factors(steps=80, stages="0:100,30:80")
    after = factors(steps=200, stages="0:100,30:80,50:200")
    assert before[:51] == after[:51] and len(after) == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "1:5",
        "0:0",
        "0:5,",
        "0:5,5:9",
        "0:9,4:4",
        "0:9,4:12,3:20",
        "0:9, 4:12",
        "0:٣",
        "0:-1",
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="`stages` can't be"):
        resolve({"steps": 9, "stages": text})


def test_stages_are_read_as_written_and_fit_the_other_settings() -> None:
    stages = (Stage(0, 9), Stage(4, 12), Stage(11, 20))
    assert parsed_stages(written(stages)) == stages
    recorded = resolve({"steps": 20, "stages": written(stages)}).settings()
    assert resolve({}, recorded).settings() == recorded
    assert resolve({"steps": 30}, recorded).training.stages is None
    assert resolve({"budget": 9.0}, recorded).training.stages is None
    with pytest.raises(UsageError, match="does not end at `steps` 19"):
        resolve({"steps": 19, "stages": written(stages)})
    with pytest.raises(UsageError, match="exclude each other"):
        resolve({"budget": 9.0, "stages": written(stages)})


def ran(clock: Clock, pace: list[float], trial: float, budget: float = 100.0) -> tuple[float, Any]:
    """A run on a clock, whose steps take these seconds and then the last of them again."""
    began = clock.now
    deadline = Deadline(began + budget, budget, Pace(trial, 2 * trial))
    training: Any = deadline.planned(resolve({"budget": budget}).training)
    deadline.begin(0)
    step = 0
    while step < training.steps:
        clock.now += pace[min(step, len(pace) - 1)]
        step += 1
        if step % training.eval_every == 0 or step == training.steps:
            clock.now += 2 * trial
            deadline.evaluated(2 * trial)
        if deadline.is_look_due():
            training = deadline.planned_again(training, step) or training
    return clock.now - began, training


@pytest.mark.parametrize(
    ("pace", "trial"),
    [
        ([0.1], 0.1),
        ([0.1], 0.5),
        ([0.5], 0.1),
        ([0.1] * 300 + [0.4], 0.1),
        ([0.4] * 100 + [0.1], 0.4),
        ([2.0], 2.0),
        ([1.0] * 10 + [4.0], 1.0),
    ],
)
def test_a_budget_is_kept_whatever_the_pace(pace: list[float], trial: float, clock: Clock) -> None:
    took, training = ran(clock, pace, trial)
    assert 90 <= took <= 110
    assert learning_rate_factor(training.steps - 1, training) < 0.1


def test_a_machine_that_stops_ends_the_run_after_few_steps(clock: Clock) -> None:
    took, training = ran(clock, [0.1] * 500 + [200.0, 0.1], 0.1)
    assert training.steps == 501 + 3 and took == pytest.approx(252, abs=5)


def timeless(run: Run) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in timed} for record in run.metrics()]


def test_a_run_of_a_budget_is_repeated_by_what_it_recorded(
    dataset: Dataset, tmp_path: Path, ticking_clock: Clock
) -> None:
    where: dict[str, Any] = {"checkpoint_dir": tmp_path}
    began = ticking_clock.now
    events: list[object] = []

    def listen(event: object) -> None:
        events.append(event)
        if isinstance(event, Evaluated):  # so that fewer steps fit than were planned
            ticking_clock.now += 0.15

    run = attnlm.train(dataset.path, budget=2.0, on_event=listen, **SMALL, **where)
    assert 1.4 < ticking_clock.now - began < 2.2
    replanned = [event for event in events if isinstance(event, Replanned)]
    assert replanned and replanned[-1].run.config == run.config
    assert attnlm.open_run(run.path).config == run.config
    training = run.config.training
    assert training.stages is not None and training.budget is None
    assert run.metrics()[-1]["step"] == training.steps
    assert run.metrics()[-1]["learning_rate"] < 0.1 * training.learning_rate
    again = attnlm.train(dataset.path, recipe=run.path / "config.json", **where)
    assert again.last.read_bytes()[-1000:] == run.last.read_bytes()[-1000:]
    assert again.metrics()[-1]["val_loss"] == run.metrics()[-1]["val_loss"]


def test_a_run_of_a_budget_is_resumed_by_its_plan_and_without_a_clock(
    dataset: Dataset, tmp_path: Path
) -> None:
    where: dict[str, Any] = {"checkpoint_dir": tmp_path}
    given = {"steps": 40, "stages": "0:50,10:30,20:40", "eval_every": 8, **SMALL}
    whole = attnlm.train(dataset.path, **given, **where)

    def stop(event: object) -> None:
        if isinstance(event, Evaluated) and event.record["step"] == 16:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        attnlm.train(dataset.path, name="mine", on_event=stop, **given, **where)
    events: list[object] = []
    resumed = attnlm.train(resume="mine", on_event=events.append, **where)
    assert timeless(resumed) == timeless(whole)
    assert resumed.last.read_bytes() == whole.last.read_bytes()
    assert not any(isinstance(event, Replanned) for event in events)
    longer = attnlm.train(resume="mine", steps=60, **where)
    assert longer.config.training.stages is None and longer.metrics()[-1]["step"] == 60


def test_a_trial_holds_one_model_at_a_time_and_none_afterwards(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve({"model": "transformer", **SMALL, "threads": 2, "steps": 9})
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    most = 0

    def counted(*about: Any) -> Any:
        nonlocal most
        state = initial_state(*about)
        alive.add(state.optimizer)
        most = max(most, len(alive))
        return state

    monkeypatch.setattr(budgets, "initial_state", counted)
    gc.disable()  # what refers to itself would stay until Python looks for such things
    try:
        budget = budgets.Budget(30.0, time.perf_counter())
        budgets.seconds_per_step(config, dataset, choose_device("cpu"), budget, 0.001)
        assert most == 1 and not alive
    finally:
        gc.enable()


def test_too_short_a_budget_is_refused_with_advice(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepping(*_: object) -> float:
        return 0.5

    monkeypatch.setattr(budgets, "seconds_per_step", stepping)
    with pytest.raises(AttnlmError, match="a step takes 500 ms, and fewer than 10") as caught:
        attnlm.train(dataset.path, budget=4.0, checkpoint_dir=tmp_path / "runs", **SMALL)
    assert "a smaller model" in str(caught.value.hint) and "`budget` of" in str(caught.value.hint)
    assert not (tmp_path / "runs").exists()


def test_a_trial_whose_first_step_takes_too_long_ends_there(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_LONGEST_FIRST_STEP", 1e-9)
    with pytest.raises(AttnlmError, match="fewer than 10 steps fit"):
        attnlm.train(dataset.path, budget=60.0, checkpoint_dir=tmp_path / "runs", **SMALL)


def test_a_batch_that_would_take_hours_is_not_tried(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []

    def seconds_of_step(stepper: Stepper) -> float:
        batches.append(stepper.config.batch_size)
        return 200.0

    monkeypatch.setattr(budgets, "_seconds_of_step", seconds_of_step)
    with pytest.raises(AttnlmError, match="a step takes 100 s or more, and fewer than 10"):
        attnlm.train(dataset.path, budget=200.0, checkpoint_dir=tmp_path / "runs", **SMALL)
    assert set(batches) == {1}


def test_a_command_s_time_begins_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlm.base import clock as clocks

    monkeypatch.setattr(clocks, "command_began", 12.0)
    assert clocks.began() == 12.0
    monkeypatch.setattr(clocks, "command_began", None)
    assert clocks.began() == pytest.approx(time.perf_counter(), abs=5)
    budget = budgets.Budget(60.0, time.perf_counter() - 50)
    assert budget.ends - time.perf_counter() == pytest.approx(10, abs=1)
    late = replace(budget, began=time.perf_counter() - 70)
    assert 1 < late.ends - time.perf_counter() <= 2
