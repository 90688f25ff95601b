"""Evaluate the model in training; write evaluations, snapshots, checkpoints and settings."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnlm.base.errors import AttnlmError
from attnlm.base.files import suggest_remedy
from attnlm.base.folders import resume_command
from attnlm.base.signals import Interrupted
from attnlm.compute.device import Device
from attnlm.compute.processes import LostProcessError
from attnlm.data.dataset import Dataset
from attnlm.data.examples import limit_per_window
from attnlm.model.language_model import LanguageModel
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.journal import EvaluationRecord, Snapshot
from attnlm.runs.records import CheckpointFacts
from attnlm.runs.run import Run
from attnlm.training.budget_clock import expected_steps
from attnlm.training.eval_budget import affordable_tokens_of_budget
from attnlm.training.events import Evaluated
from attnlm.training.learning_rate import learning_rate
from attnlm.training.recorded import check_recorded
from attnlm.training.reporter import Stopwatch
from attnlm.training.run_schedule import RunSchedule
from attnlm.training.state import TrainingState, save_state
from attnlm.training.step import StepNotFiniteError, Stepper
from attnlm.training.validation_loss import Evaluation, right_answers, validation_loss

_MOST_ANSWERS = 500
"""The most examples whose answers are computed at each evaluation."""
_FEWEST_ANSWERS = 20
TakeSnapshot = Callable[[int, LanguageModel, Device], tuple[Snapshot, list[str]]]
"""Returns a snapshot of the model at a step, and the tokens of its attention maps."""


@dataclass
class RunWriter:
    """Evaluates the model of a run, and writes metrics, snapshots and checkpoints."""

    run: Run
    dataset: Dataset
    stepper: Stepper
    run_schedule: RunSchedule
    watch: Stopwatch
    take_snapshot: TakeSnapshot

    def __post_init__(self) -> None:
        self._state = self.stepper.state
        self._evaluations = 0

    def add_evaluation(self) -> Evaluated:
        """Evaluate, then write the metrics, the snapshot and the checkpoints."""
        began = time.perf_counter()
        state = self._state
        training = self.run.config.training
        loss_sum = self.stepper.read_loss_sum()  # waits for a GPU, before the clock is read
        tokens_per_second = self.watch.tokens_per_second()
        if self.stepper.has_stepped and self.stepper.processes.is_main:
            self._evaluations += 1
            # What a late step changes is found within twice the steps, and at the end.
            if self._evaluations.bit_count() == 1 or self.run_schedule.is_over:
                check_recorded(self.run.config, state.model, state.device)
                began = time.perf_counter()  # this check comes rarely
        validation_began = time.perf_counter()
        evaluation = _evaluate(self.stepper, self.dataset, training.eval_tokens)
        validation_seconds = time.perf_counter() - validation_began
        if not math.isfinite(evaluation.loss):
            raise StepNotFiniteError(state.step, state.step)
        snapshot_and_passage = self._snapshot()
        new_steps = state.step - max(0, state.evaluated_step)
        train_loss = loss_sum / new_steps if self.stepper.has_counted else None
        accuracy = evaluation.accuracy if training.best_by == "accuracy" else None
        improved = state.record_evaluation(evaluation.loss, accuracy)
        self.stepper.reset_loss_sum()
        record = self._record(evaluation, train_loss, tokens_per_second)
        snapshot = None
        with explaining_write_errors(self.run, state):
            if snapshot_and_passage is not None:
                snapshot, passage = snapshot_and_passage
                self.run.append_evaluations(record)
                self.run.append_snapshot(snapshot, passage)
            if self.stepper.processes.is_main:
                save_state(self.run, state, evaluation.loss if improved else None)
        self.run_schedule.record_evaluation(time.perf_counter() - began, validation_seconds)
        return Evaluated(
            **vars(record),
            improved=improved,
            snapshot=snapshot,
            is_last=self.run_schedule.should_stop,
        )

    def _record(
        self, evaluation: Evaluation, train_loss: float | None, tokens_per_second: float
    ) -> EvaluationRecord:
        state = self._state
        config = self.run.config
        steps = expected_steps(config.training, state.step, state.progress)
        return EvaluationRecord(
            step=state.step,
            tokens=state.step * config.tokens_per_step,
            seconds=round(self.watch.seconds(), 3),
            train_loss=train_loss,
            val_loss=evaluation.loss,
            evaluated_tokens=evaluation.tokens,
            accuracy=evaluation.accuracy,
            bits_per_byte=evaluation.bits_per_byte,
            learning_rate=learning_rate(state.step, config.training, steps),
            tokens_per_second=round(tokens_per_second),
        )

    def keep_weights(self) -> None:
        """Keep the weights of this step, if `keep_every` says so."""
        keep_every, step = self.run.config.training.keep_every, self._state.step
        if keep_every is not None and step % keep_every == 0 and self.stepper.processes.is_main:
            with explaining_write_errors(self.run, self._state):
                facts = CheckpointFacts(step=step).content()
                save_checkpoint(self.run.kept(step), self._state.optimizer.weights(), facts)

    def add_snapshot(self) -> None:
        """Add a snapshot to the run, without an evaluation."""
        snapshot_and_passage = self._snapshot()
        if snapshot_and_passage is not None:
            with explaining_write_errors(self.run, self._state):
                self.run.append_snapshot(*snapshot_and_passage)

    def _snapshot(self) -> tuple[Snapshot, list[str]] | None:
        """Return a snapshot in rank 0, and None in other processes."""
        if not self.stepper.processes.is_main:
            return None
        return self.take_snapshot(self._state.step, self._state.model, self._state.device)

    @contextlib.contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """If a signal ends this context after a step, save the last complete step."""
        try:
            yield
        except LostProcessError:
            # torchrun signals the others when a process has failed, which may be noticed later.
            if self.stepper.stop.signum is not None:
                raise Interrupted(self.stepper.stop.signum) from None
            raise
        except Interrupted:
            if self.stepper.has_stepped:
                self._save_stopped()
                # torchrun stops all processes when the first one ends: wait for rank 0.
                if not self.stepper.processes.is_main:
                    with contextlib.suppress(LostProcessError):
                        self.stepper.processes.broadcast_object(None)
            raise

    def _save_stopped(self) -> None:
        if not self.stepper.processes.is_main:
            return
        seconds = round(self.watch.seconds(), 3)
        self._state.loss_sum = self.stepper.read_loss_sum()
        with explaining_write_errors(self.run, self._state):
            save_state(self.run, self._state)
            replace(self.run, stopped_after=seconds).save_config()


@contextlib.contextmanager
def explaining_write_errors(run: Run, state: TrainingState) -> Iterator[None]:
    """Convert an OSError from writing the run to AttnlmError, which says what is saved."""
    try:
        yield
    except OSError as error:
        again = "train it again" if state.saved_step is None else resume_command(run.path)
        raise AttnlmError(
            f"cannot write {error.filename or run.path}: {error.strerror or error}",
            f"{suggest_remedy(error)}, then: {again}; {saved_in_words(run, state)}",
        ) from error


def saved_in_words(run: Run, state: TrainingState) -> str:
    """Return a clause that says which step of the run is saved."""
    if state.saved_step is None:
        return "the run has no checkpoint yet"
    return f"{run.last} has step {state.saved_step}"


def tune_eval_tokens(run: Run, dataset: Dataset, stepper: Stepper) -> Run:
    """Choose, by the speed of an evaluation, how many tokens a run with a budget evaluates."""
    training = run.config.training
    if training.budget is None or training.eval_tokens is not None:
        return run
    tokens = affordable_tokens_of_budget(run.config, 0.0, dataset.val_tokens)
    in_budget = 0.0
    for _ in range(2):  # the first evaluation is slower than others
        began = time.perf_counter()
        evaluation = _evaluate(stepper, dataset, tokens)
        in_budget = training.budget * evaluation.tokens / (time.perf_counter() - began)
    tokens = affordable_tokens_of_budget(run.config, in_budget, dataset.val_tokens)
    tokens = stepper.processes.broadcast_object(tokens)
    return record_settings(run, stepper, eval_tokens=tokens)


def record_settings(run: Run, stepper: Stepper, **settings: int | None) -> Run:
    """Return the run with settings that were chosen during the training; rank 0 saves them."""
    run = replace(run, config=run.config.with_training(**settings))
    if stepper.processes.is_main:
        with explaining_write_errors(run, stepper.state):
            run.save_config()
    return run


def _evaluate(stepper: Stepper, dataset: Dataset, most: int | None) -> Evaluation:
    only_answers = stepper.training.loss_on == "answers"
    evaluation = validation_loss(
        stepper.state.model,
        dataset.val,
        stepper.state.device,
        bytes_per_token=dataset.bytes_per_answer_token if only_answers else dataset.bytes_per_token,
        native=stepper.training.compile == "native",
        threads=stepper.training.threads,
        most=most,
        processes=stepper.processes,
        stop=stepper.stop,
        examples=limit_per_window(dataset.val_examples, stepper.training.examples_per_window),
        only_answers=only_answers,
    )
    if dataset.val_examples is None:
        return evaluation
    answers = _MOST_ANSWERS
    if most is not None:  # all would take too long
        affordable = most * len(dataset.val_examples) // len(dataset.val)
        answers = min(answers, max(_FEWEST_ANSWERS, affordable))
    # All processes compute the same answers: by their accuracy, each decides alike what is best.
    is_right = right_answers(
        stepper.state.model, dataset.val, dataset.val_examples, stepper.state.device, most=answers
    )
    return replace(evaluation, accuracy=float(is_right.mean()))
