"""The training loop: batches → loss → update, with evaluations and checkpoints. Never prints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from attnlm.base.events import Note, OnEvent
from attnlm.base.files import explaining_os_errors
from attnlm.base.folders import resume_command
from attnlm.base.process import Interrupted
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE, LostProcessError, Processes
from attnlm.config.settings import Config
from attnlm.data.dataset import Dataset
from attnlm.model.language_model import LanguageModel
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.journal import EvaluationRecord, Snapshot
from attnlm.runs.records import CheckpointFacts
from attnlm.runs.run import Run
from attnlm.training.events import Evaluated, Finished, Started, Stepped
from attnlm.training.memory import estimate_memory
from attnlm.training.random_state import keeping_random_state
from attnlm.training.recorded import check_recorded
from attnlm.training.state import TrainingState, save_state
from attnlm.training.step import StepNotFiniteError, Stepper
from attnlm.training.validation import Evaluation, Split, right_answers, validation_loss

OnStep = Callable[[int, Tensor], object]
"""Receives the number of steps made and the last step's loss, a tensor () on the device."""
TakeSnapshot = Callable[[int, LanguageModel, Device], Snapshot]
"""Returns a snapshot of the model at a step."""

_MOST_ANSWERS = 500
"""The most examples whose answers are computed at each evaluation."""
_FEWEST_ANSWERS = 20
_SECONDS_BETWEEN_REPORTS = 0.1


def fit(
    run: Run,
    dataset: Dataset,
    state: TrainingState,
    on_event: OnEvent,
    take_snapshot: TakeSnapshot,
    ends: float | None = None,
    processes: Processes = ALONE,
    on_step: OnStep | None = None,
) -> Run:
    """Train from `state` to the run's last step; report events from Started to Finished.

    A run with a budget ends when rank 0's `time.perf_counter` reaches `ends`; the returned run says
    how many steps were made. `take_snapshot` is called at each evaluation and at early steps,
    `on_step` after each step. A signal to one process stops all processes. Rank 0 writes the files.
    Raises AttnlmError if own code computes something else than the run records, numbers are no
    longer finite, a file can't be written, or another process has ended or does not answer. After a
    signal, saves the run if a step was made, then raises Interrupted.
    """
    with keeping_random_state(state.device):
        stepper = Stepper(state, run.config, dataset, processes, ends)
        schedule = stepper.schedule

        def tell(event: object) -> None:
            with schedule.paused():
                on_event(event)

        report_due = time.perf_counter() + _SECONDS_BETWEEN_REPORTS
        with stepper.stop.listening():
            memory = estimate_memory(run.config, run.vocab_size, state.device.name)
            tell(Started(run, state.device, state.step, memory.total))
            state.model.train()
            schedule.restart()
            try:
                while True:
                    stepper.stop.check()
                    if schedule.should_evaluate:
                        tell(_evaluate_and_save(run, dataset, stepper, take_snapshot))
                        schedule.restart()
                        stepper.stop.check()
                    elif schedule.should_snapshot:
                        _add_snapshot(run, stepper, take_snapshot)
                        schedule.restart()
                    _keep_weights(run, stepper)
                    if schedule.should_stop:
                        break
                    loss = stepper.step()
                    if stepper.config is not run.config:
                        run = _record(run, stepper, stepper.config)
                        fitting = f"`micro_batch_size` {run.config.training.micro_batch_size}"
                        tell(Note(f"memory ran out: {fitting} is used from now on"))
                    if processes.is_main and time.perf_counter() >= report_due:
                        tell(_progress(stepper, loss))
                        report_due = time.perf_counter() + _SECONDS_BETWEEN_REPORTS
                    if on_step is not None:
                        with schedule.paused():
                            on_step(state.step, loss)
            except (Interrupted, LostProcessError) as error:
                _save_when_stopped(run, stepper, error)
                raise
            if schedule.is_over:
                run = _with_steps(run, stepper)
            tell(Finished(run, state.step, schedule.is_out_of_patience))
    return run


def _with_steps(run: Run, stepper: Stepper) -> Run:
    """Record how many steps a run with a budget has made."""
    training, made = run.config.training, stepper.state.step
    if training.budget is None:
        return run
    warmup = min(training.warmup, made // 4)
    return _record(run, stepper, run.config.with_training(steps=made, warmup=warmup))


def _progress(stepper: Stepper, loss: Tensor) -> Stepped:
    """Return the report of the newest step. Raises StepNotFiniteError."""
    stepper.check_loss()
    norm, schedule = stepper.state.optimizer.norm(), stepper.schedule
    return Stepped(
        step=stepper.state.step,
        loss=loss.item(),
        tokens_per_second=schedule.tokens_per_second(),
        seconds_left=schedule.seconds_left(),
        gradient_norm=None if norm is None else norm.item(),
        learning_rate=schedule.learning_rate,
        steps=round(schedule.steps),
    )


# --- Evaluations ----------------------------------------------------------------------------------


def _evaluate_and_save(
    run: Run, dataset: Dataset, stepper: Stepper, take_snapshot: TakeSnapshot
) -> Evaluated:
    """Evaluate the model, then write the metrics, the snapshot and the checkpoints."""
    state, schedule, training = stepper.state, stepper.schedule, run.config.training
    began = time.perf_counter()
    stepper.check()  # waits for a GPU, before the clock is read
    speed = round(schedule.tokens_per_second())
    if stepper.has_stepped and stepper.processes.is_main:
        schedule.evaluations += 1
        # What a late step changes is found within twice the steps, and at the end.
        if schedule.evaluations.bit_count() == 1 or schedule.is_over:
            check_recorded(run.config, state.model, state.device)
            began = time.perf_counter()  # this check comes rarely
    evaluation = _evaluate(stepper, dataset, training.eval_tokens)
    if not math.isfinite(evaluation.loss):
        raise StepNotFiniteError(state.step, state.step, training, state.saved_step)
    taken = None
    if stepper.processes.is_main:
        taken = take_snapshot(state.step, state.model, state.device)
    train_loss = state.loss_sum / state.counted_steps if state.counted_steps else None
    accuracy = evaluation.accuracy if training.best_by == "accuracy" else None
    improved = state.record_evaluation(evaluation.loss, accuracy)
    stepper.reset_loss_sum()
    record = EvaluationRecord(
        step=state.step,
        tokens=state.step * run.config.tokens_per_step,
        seconds=round(schedule.seconds(), 3),
        train_loss=train_loss,
        val_loss=evaluation.loss,
        evaluated_tokens=evaluation.tokens,
        accuracy=evaluation.accuracy,
        bits_per_byte=evaluation.bits_per_byte,
        learning_rate=schedule.learning_rate,
        tokens_per_second=speed,
    )
    if taken is not None:
        with _writing(run, state):
            run.append_evaluations(record)
            run.append_snapshot(taken)
            save_state(run, state, evaluation.loss if improved else None)
    schedule.evaluated(time.perf_counter() - began)
    return Evaluated(
        **vars(record),
        improved=improved,
        snapshot=taken,
        is_last=schedule.should_stop,
    )


def _evaluate(stepper: Stepper, dataset: Dataset, most: int | None) -> Evaluation:
    """Return the loss of the model over the validation split or `most` of its tokens."""
    state, examples, training = stepper.state, dataset.val_examples, stepper.config.training
    split = Split.of(dataset, training)
    evaluation = validation_loss(state.model, split, training, most, stepper)
    if examples is None:
        return evaluation
    answers = _MOST_ANSWERS
    if most is not None:  # all would take too long
        answers = min(answers, max(_FEWEST_ANSWERS, most * len(examples) // len(dataset.val)))
    # All processes compute the same answers: by their accuracy, each decides alike what is best.
    is_right = right_answers(state.model, dataset.val, examples, state.device, most=answers)
    return replace(evaluation, accuracy=float(is_right.mean()))


# --- Files ----------------------------------------------------------------------------------------


def _record(run: Run, stepper: Stepper, config: Config) -> Run:
    """Return the run with what the training has chosen; rank 0 saves it."""
    run = replace(run, config=config)
    if stepper.processes.is_main:
        with _writing(run, stepper.state):
            run.save_config()
    return run


def _keep_weights(run: Run, stepper: Stepper) -> None:
    """Keep the weights of this step, if `keep_every` says so."""
    keep_every, step = run.config.training.keep_every, stepper.state.step
    if keep_every is not None and step % keep_every == 0 and stepper.processes.is_main:
        with _writing(run, stepper.state):
            facts = CheckpointFacts(step=step).content()
            save_checkpoint(run.kept(step), stepper.state.optimizer.weights(), facts)


def _add_snapshot(run: Run, stepper: Stepper, take_snapshot: TakeSnapshot) -> None:
    """Add a snapshot to the run, without an evaluation."""
    state = stepper.state
    if stepper.processes.is_main:
        snapshot = take_snapshot(state.step, state.model, state.device)
        with _writing(run, state):
            run.append_snapshot(snapshot)


def _save_when_stopped(run: Run, stepper: Stepper, error: BaseException) -> None:
    """Save the last complete step, if any, of a run that a signal has stopped.

    Raises Interrupted if another process was lost since it got the signal first.
    """
    state, processes = stepper.state, stepper.processes
    seconds = stepper.schedule.seconds()
    if isinstance(error, LostProcessError):
        # torchrun signals the others when a process has failed, which may be noticed later.
        if stepper.stop.signum is not None:
            raise Interrupted(stepper.stop.signum) from None
    elif stepper.has_stepped and processes.is_main:
        stepper.check()
        with _writing(run, state):
            save_state(run, state)
            replace(run, stopped_after=round(seconds, 3)).save_config()
    elif stepper.has_stepped:
        # torchrun stops all processes when the first one ends: wait for rank 0.
        with contextlib.suppress(LostProcessError):
            processes.broadcast_object(None)


def _writing(run: Run, state: TrainingState) -> contextlib.AbstractContextManager[None]:
    """Return a context that turns an OSError into AttnlmError, which says what is saved."""
    again = "train it again"
    if state.saved_step is not None:
        again = f"{resume_command(run.path)}; {run.last} has step {state.saved_step}"
    return explaining_os_errors(run.path, f", then: {again}")
