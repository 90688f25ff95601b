"""The training loop: batches → loss → update, with evaluations and checkpoints. Never prints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent
from attnlm.compute.processes import ALONE, Processes
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run
from attnlm.training.budget_clock import BudgetClock
from attnlm.training.events import Finished, Started
from attnlm.training.memory import estimate_memory
from attnlm.training.random_state import keeping_random_state
from attnlm.training.recorded import check_recorded
from attnlm.training.reporter import Reporter, Stopwatch
from attnlm.training.run_schedule import RunSchedule
from attnlm.training.run_writer import (
    RunWriter,
    TakeSnapshot,
    record_settings,
    saved_in_words,
    tune_eval_tokens,
)
from attnlm.training.state import TrainingState
from attnlm.training.step import StepNotFiniteError, Stepper

OnStep = Callable[[int, Tensor], object]
"""Receives the number of steps made and the last step's loss, a tensor () on the device."""


def fit(
    run: Run,
    dataset: Dataset,
    state: TrainingState,
    on_event: OnEvent,
    take_snapshot: TakeSnapshot,
    clock: BudgetClock | None = None,
    processes: Processes = ALONE,
    on_step: OnStep | None = None,
) -> Run:
    """Train from `state` to the run's last step; report events from Started to Finished.

    The `clock` of rank 0 ends a run with a budget; the returned run says how many steps were made.
    `take_snapshot` is called at each evaluation and at early steps, `on_step` after each step. A
    signal to one process stops all processes. Rank 0 writes the files. Raises AttnlmError if own
    code computes something else than the run records, numbers are no longer finite, a file can't be
    written, or another process has ended or does not answer. After a signal, saves the run if a
    step was made, then raises Interrupted.
    """
    with keeping_random_state(state.device, run.config):
        if processes.is_main:
            check_recorded(run.config, state.model, state.device)
        stepper = Stepper(state, run.config, dataset, processes, clock)
        with stepper.stop.listening(), _explaining_not_finite_errors(run, state):
            watch = Stopwatch(state, run.config.tokens_per_step)
            run = tune_eval_tokens(run, dataset, stepper)
            training = run.config.training
            run_schedule = RunSchedule(run.config, state, dataset.val_tokens, clock, processes)
            writer = RunWriter(run, dataset, stepper, run_schedule, watch, take_snapshot)
            reporter = Reporter(training, stepper, run_schedule, watch, on_event)

            memory = estimate_memory(run.config, run.vocab_size, state.device.name)
            reporter.tell(Started(run, state.device, state.step, memory.total))
            if stepper.kept_whole_because:
                words = "each batch is computed whole, in one thread"
                reporter.tell(Note(f"{stepper.kept_whole_because}: {words}"))
            watch.restart()
            state.model.train()
            with writer.saving_when_stopped():
                while True:
                    stepper.stop.check()
                    if run_schedule.should_evaluate:
                        reporter.tell(writer.add_evaluation())
                        watch.restart()
                        stepper.stop.check()
                    elif run_schedule.should_snapshot:
                        writer.add_snapshot()
                        watch.restart()
                    writer.keep_weights()
                    if run_schedule.should_stop:
                        break
                    began = time.perf_counter()
                    loss = stepper.step()
                    run_schedule.stepped(time.perf_counter() - began)
                    fitting = stepper.training.micro_batch_size
                    if fitting != run.config.training.micro_batch_size:
                        run = record_settings(run, stepper, micro_batch_size=fitting)
                        writer.run = run
                        words = f"memory ran out: `micro_batch_size` {fitting} is used from now on"
                        reporter.tell(Note(words))
                    reporter.stepped(loss)
                    if on_step is not None:
                        with watch.paused():
                            on_step(state.step, loss)
            if training.budget is not None and run_schedule.is_over:
                warmup = min(training.warmup, state.step // 4)
                run = record_settings(run, stepper, steps=state.step, warmup=warmup)
            reporter.tell(Finished(run, state.step, run_schedule.is_out_of_patience))
    return run


@contextlib.contextmanager
def _explaining_not_finite_errors(run: Run, state: TrainingState) -> Iterator[None]:
    """Convert StepNotFiniteError to AttnlmError, which says what is saved."""
    try:
        yield
    except StepNotFiniteError as error:
        training = run.config.training
        hint = f"lower `learning_rate` {training.learning_rate:g}"
        if training.gradient_clip is None:
            hint += " or add `gradient_clip` 1"
        raise AttnlmError(f"the {error}", f"{hint}; {saved_in_words(run, state)}") from error
