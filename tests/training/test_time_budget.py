"""A budget is a clock: learning rate, evaluations and the end follow the time that has passed.

Evaluations while training use the whole split if that is cheap, else a part.
"""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlm
from attnlm.base import process as clocks
from attnlm.base.events import Note
from attnlm.base.process import Interrupted
from attnlm.config.recipes import load_sizes, recipe_names
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset
from attnlm.model.architecture import MODELS
from attnlm.see.report import report
from attnlm.see.reproduce import train_command
from attnlm.training import loop
from attnlm.training import schedule as schedules
from attnlm.training.events import Stepped
from attnlm.training.schedule import (
    MOST_TOKENS,
    affordable_eval_tokens,
    budget_end,
    learning_rate,
)
from attnlm.training.step import Stepper
from attnlm.training.validation import Split, validation_loss
from tests.kit import Clock, command
from tests.models import small_model
from tests.processes import in_processes, train_by_the_clock
from tests.training.conftest import signal_after_step

SMALL: dict[str, Any] = {"optimizer": "adamw", "block_size": 8, "batch_size": 4, "seed": 1}
SMALL |= {"device": "cpu", "threads": 1}


@pytest.fixture
def paced(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes step number n of a training take `pace(n)` seconds, and everything else no time."""
    step, clock.tick = Stepper.step, 1e-6

    def set_pace(pace: Any) -> Clock:
        def timed(stepper: Stepper, **options: Any) -> Any:
            clock.advance(pace(stepper.state.step))
            return step(stepper, **options)

        monkeypatch.setattr(Stepper, "step", timed)
        return clock

    return set_pace


def constant(seconds: float) -> Any:
    return lambda step: seconds


@pytest.fixture
def timed(dataset: Dataset, tmp_path: Path) -> Any:
    """Return a function that trains within a budget, by default of 100 s."""
    return functools.partial(attnlm.train, dataset, checkpoint_dir=tmp_path, budget=100.0, **SMALL)


PACES = {
    "constant": constant(1.0),
    "slower and slower": lambda step: 1.0 + step / 50,
    "a first step that is compiled": lambda step: 12.0 if step == 0 else 0.8,
    "twice as slow from the middle on": lambda step: 1.0 if step < 50 else 2.0,
    "faster from the middle on": lambda step: 2.0 if step < 25 else 0.9,
}


@pytest.mark.parametrize("pace", PACES)
def test_a_run_ends_on_time_with_a_rate_near_zero_and_ten_evaluations(
    pace: str, timed: Any, paced: Any
) -> None:
    clock = paced(PACES[pace])
    began = clock.now
    events: list[Any] = []
    run = timed(on_event=events.append)
    rates: list[Any] = [e.learning_rate for e in events if isinstance(e, Stepped)]
    assert clock.now - began == pytest.approx(100, abs=3)
    records, training = run.metrics(), run.config.training
    made = records[-1]["step"]
    assert (training.steps, training.budget) == (made, 100.0)
    assert attnlm.open_run(run.path).config == run.config
    assert 10 <= len(records) <= 12 and records[-1]["learning_rate"] < 0.05 * max(rates)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    falls = [a - b for a, b in itertools.pairwise([*rates[1:], 0.0])]
    assert max(falls) < 0.05 * max(rates)  # nothing jumps


def test_a_machine_that_stops_for_long_ends_the_run(timed: Any, paced: Any) -> None:
    clock = paced(lambda step: 300.0 if step == 30 else 1.0)
    began, run = clock.now, timed()
    assert run.config.training.steps == 31 and clock.now - began == pytest.approx(330, abs=2)


def test_a_budget_of_a_few_steps_says_so_and_makes_one_at_least(timed: Any, paced: Any) -> None:
    paced(constant(1000.0))
    notes: list[object] = []
    run = timed(budget=60.0, warmup=50, on_event=notes.append)
    assert run.metrics()[-1]["step"] == run.config.training.steps == 1
    assert run.config.training.warmup == 0


@pytest.mark.parametrize("warmup", [0, 10, 24])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_at_a_constant_pace_equals_a_run_by_steps(
    schedule: str, warmup: int
) -> None:
    training = resolve({"schedule": schedule, "warmup": warmup, "steps": 100}).training
    timed = resolve({"schedule": schedule, "warmup": warmup, "budget": 100.0}).training
    for step in range(1, 101):
        assert learning_rate(step, timed, 100) == pytest.approx(learning_rate(step, training))


def test_a_warm_up_takes_a_quarter_of_the_time_at_most() -> None:
    training = resolve({"warmup": 500, "budget": 9.0}).training
    rates = [learning_rate(step + 1, training, 40) for step in range(40)]
    assert max(rates) == rates[10] and rates[:11] == sorted(rates[:11])


def test_evaluations_that_take_long_are_fewer(
    timed: Any, paced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = paced(constant(0.5))

    def slow(*about: Any) -> Any:
        clock.advance(6.0)
        return validation_loss(*about)

    monkeypatch.setattr(loop, "validation_loss", slow)
    began, run = clock.now, timed()
    assert 94 < clock.now - began < 103
    assert 3 <= len(run.metrics()) <= 5


def test_the_last_loss_over_the_whole_split_leaves_most_of_a_budget_for_steps(
    timed: Any, paced: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation of a part, with its snapshot and saving, takes long for its few tokens."""
    clock = paced(constant(0.5))

    def slow(*about: Any) -> Any:
        clock.advance(1.4)
        return validation_loss(*about)

    monkeypatch.setattr(loop, "validation_loss", slow)
    began, run = clock.now, timed(eval_tokens=8)
    assert 1.4 * dataset.val_tokens / 8 > 100  # in proportion
    assert 90 < clock.now - began < 101
    assert len(run.metrics()) > 9


@pytest.mark.usefixtures("costly")
def test_a_budget_s_evaluations_use_a_hundredth_of_it(
    timed: Any, paced: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced(constant(0.5))
    vocab_size = dataset.vocab_size
    forward = resolve(SMALL).spec.costs(vocab_size).forward_flops + 200 * vocab_size
    monkeypatch.setattr(schedules, "_OPERATIONS_PER_SECOND", 100 * forward)  # 100 tokens a second
    run = timed()
    assert run.config.training.eval_tokens == 96  # in whole windows
    assert {record["evaluated_tokens"] for record in run.metrics()} == {96}
    asked = timed(eval_tokens=24, eval_every=30)
    assert {record["evaluated_tokens"] for record in asked.metrics()} == {24}
    assert [record["step"] for record in asked.metrics()][:4] == [0, 30, 60, 90]


def test_a_run_that_is_resumed_continues_the_clock(timed: Any, tmp_path: Path, paced: Any) -> None:
    clock = paced(constant(1.0))

    with pytest.raises(Interrupted):
        timed(name="mine", **signal_after_step(40))
    stopped = attnlm.open_run(tmp_path / "mine")
    assert stopped.config.training.steps is None
    began = clock.now
    run = attnlm.train(resume=stopped)
    assert clock.now - began == pytest.approx(60, abs=4)
    rates = [record["learning_rate"] for record in run.metrics()]
    assert rates[1:] == sorted(rates[1:], reverse=True) and rates[-1] < 0.05 * rates[0]
    assert run.config.training.steps == pytest.approx(100, abs=4)

    # It is finished now; with steps it is extended by these, as any other run.
    notes: list[Any] = []
    attnlm.train(resume=run, on_event=notes.append)
    assert any(isinstance(note, Note) and "is finished" in note.text for note in notes)
    longer = attnlm.train(resume=run, steps=120)
    assert longer.config.training.budget is None and longer.metrics()[-1]["step"] == 120


def test_a_run_is_reproduced_by_its_number_of_steps(
    timed: Any, dataset: Dataset, tmp_path: Path, paced: Any
) -> None:
    paced(constant(2.0))
    run = timed(warmup=4)
    steps = run.config.training.steps
    command = train_command(run)
    assert f"--recipe {run.path}/config.json" in command
    page = report(run).page().decode()
    assert "the schedule is the same, the bytes are not" in " ".join(page.split())
    again = attnlm.train(dataset.path, recipe=run.path / "config.json", checkpoint_dir=tmp_path)
    assert (again.config.training.steps, again.config.training.budget) == (steps, None)
    losses = [r.metrics()[-1]["val_loss"] for r in (run, again)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_processes_follow_the_clock_of_rank_0(dataset: Dataset, tmp_path: Path) -> None:
    in_processes(2, train_by_the_clock, dataset.path, tmp_path)
    run = attnlm.open_run(tmp_path / "run")
    last = run.metrics()[-1]
    assert last["step"] == run.config.training.steps
    # A busy machine may make two steps only: the rate falls from the first to the last.
    assert last["learning_rate"] < run.config.training.learning_rate


def test_a_command_s_time_begins_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "command_began", 12.0)
    assert clocks.budget_start() == 12.0
    assert clocks.budget_start() == pytest.approx(time.perf_counter(), abs=5)
    now = time.perf_counter()
    assert budget_end(60.0, now - 50) - now == pytest.approx(10, abs=1)
    assert budget_end(60.0, now - 70) - now == pytest.approx(2, abs=1)  # it began late


# --- How much is evaluated ------------------------------------------------------------------------

# GPT-2's ids, and a recipe of several sizes.
UNLIKE = ("r4-gpt2-windows", "best")
SHAKESPEARE = {"vocab_size": 65, "val_tokens": 111_540}


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is cheap by itself, and few tokens are enough."""
    monkeypatch.setattr(schedules, "_FEWEST_TOKENS", 16)
    monkeypatch.setattr(schedules, "_CHEAP", 0.0)


@pytest.mark.parametrize(
    "config",
    [
        *(resolve({"model": model}) for model in MODELS),
        *(resolve({}, load_sizes(name)[0]) for name in recipe_names() if name not in UNLIKE),
    ],
)
def test_a_megabyte_of_characters_is_evaluated_whole(config: Any) -> None:
    assert affordable_eval_tokens(config, **SHAKESPEARE) is None


def test_expensive_evaluations_use_a_part_of_the_split() -> None:
    few = resolve({"steps": 30})
    # A tenth of three steps of 32 × 64 tokens is too few, and 1.2e11 operations are cheap.
    assert affordable_eval_tokens(few, 50_257, 150_000) == 7232
    more = resolve({"steps": 3000})
    assert affordable_eval_tokens(more, 50_257, 300_000) == 300 * 32 * 64 * 3 // 10 // 64 * 64
    assert affordable_eval_tokens(more, 50_257, 150_000) is None
    assert affordable_eval_tokens(few, 50_257, 1500) is None
    hour = resolve({"budget": 3600.0})  # a hundredth of it, at 1e11 operations a second
    assert affordable_eval_tokens(hour, 50_257, 300_000) == 217_792
    gpu = resolve({"budget": 36.0, "device": "cuda"})
    assert affordable_eval_tokens(gpu, 50_257, 10**9) == 217_792
    gpt2: dict[str, Any] = {"model": "gpt2", "embed_dim": 768, "layers": 12, "heads": 12}
    for short in ({"steps": 20}, {"budget": 30.0}):  # at least 2,048 tokens
        assert affordable_eval_tokens(resolve({**gpt2, **short}), 50_257, 40_000) == 2048
    window = resolve({**gpt2, "budget": 9.0, "block_size": 4096})
    assert affordable_eval_tokens(window, 50_257, 40_000) == 4096
    large = resolve({"steps": 10**6})
    assert affordable_eval_tokens(large, 50_257, 10 * MOST_TOKENS) is None  # its cap


def test_a_part_is_spread_evenly_over_the_split(dataset: Dataset) -> None:
    model = small_model("multi-head", dataset.vocab_size, block_size=8).float()
    val: Any = np.asarray(dataset.val)
    cpu = TrainingConfig(device="cpu")
    part = validation_loss(model, Split(val), cpu, 5 * 8 + 3)
    whole = (len(val) - 1) // 8
    starts = [number * whole // 5 * 8 for number in range(5)]
    windows = [val[start : start + 9] for start in starts]
    losses = [validation_loss(model, Split(window), cpu).loss for window in windows]
    assert part.tokens == 40
    assert part.loss == pytest.approx(sum(losses) / 5, rel=1e-5)
    everything = validation_loss(model, Split(val), cpu)
    for most in (len(val) - 1, 10 * len(val)):
        assert validation_loss(model, Split(val), cpu, most) == everything


@pytest.mark.usefixtures("costly")
def test_partial_losses_are_labelled_and_the_last_loss_is_complete(
    train: Any, dataset: Dataset
) -> None:
    notes: list[object] = []
    run = train(steps=80, eval_every=20, on_event=notes.append)
    assert run.config.training.eval_tokens == 288
    assert {record["evaluated_tokens"] for record in run.metrics()} == {288}
    assert run.evaluated_part == f"288 of {dataset.val_tokens:,} tokens"
    for which, whole in run.whole().items():
        measured = attnlm.evaluate(run, checkpoint=which, data=dataset)
        assert (whole.val_loss, whole.evaluated_tokens) == (measured.loss, measured.tokens)
        assert measured.tokens == dataset.val_tokens - 1
    assert any(isinstance(note, Note) and "whole validation split" in note.text for note in notes)
    page = report(run).page().decode()
    assert run.evaluated_part in page and "best loss, whole split" in page

    # A longer training uses the same part, and repeats the last evaluation.
    longer = attnlm.train(resume=run.path, steps=120)
    assert longer.config.training.eval_tokens == 288
    assert longer.whole().keys() == {"best", "last"} and longer.whole()["last"].step == 120


@pytest.mark.usefixtures("costly")
def test_the_last_loss_is_partial_if_the_split_is_too_large(train: Any, dataset: Dataset) -> None:
    run = train(steps=6, eval_every=1, block_size=8)
    part = f"16 of {dataset.val_tokens:,} tokens"
    assert run.evaluated_part == part and run.whole() == {}
    runs = run.path.parent
    (entry,) = attnlm.list_runs(runs)
    assert entry.evaluated_part == part and f" on {part})" in str(run.checkpoint())
    shown = command("list", "runs", "--checkpoint-dir", runs, cwd=runs)
    assert f"~{entry.val_loss:.4f}" in shown.stdout and "~ measured on a part" in shown.stderr
