"""The training loop: batches → loss → update, with evaluations and checkpoints. Never prints."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent
from attnlm.base.files import remedy
from attnlm.base.folders import resume_command
from attnlm.base.signals import Interrupted
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE, LostProcessError, Processes
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, check_unchanged
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import folded
from attnlm.runs.journal import EvaluationRecord, Snapshot
from attnlm.runs.run import Run
from attnlm.training.cost import evaluated_part, is_whole_affordable
from attnlm.training.events import Evaluated, Finished, Started, Stepped
from attnlm.training.kernels import kernels_of
from attnlm.training.schedule import Clock, learning_rate
from attnlm.training.sharding import whole_model
from attnlm.training.state import Saver, TrainingState, keeping_random_state
from attnlm.training.step import StepNotFiniteError, Stepper
from attnlm.training.validation import MOST_TOKENS, validation_loss

_SECONDS_BETWEEN_REPORTS = 0.1
_REPORT_FRACTION = 0.01
"""The largest fraction of the wall time that reports may take."""

# Fractions of a budget for evaluations, and for drawing and ending, which get at most _CLOSING s.
_EVALUATION_FRACTION, _CLOSING_FRACTION, _CLOSING = 0.15, 0.05, 1.0

OnStep = Callable[[int, Tensor], object]
"""Receives the number of steps made and the last step's loss, a tensor () on the device."""
TakeSnapshot = Callable[[int, LanguageModel, Device], tuple[Snapshot, list[str]]]
"""Returns a snapshot of the model at a step, and the tokens of its attention maps."""


def fit(
    run: Run,
    dataset: Dataset,
    state: TrainingState,
    on_event: OnEvent,
    take_snapshot: TakeSnapshot | None = None,
    clock: Clock | None = None,
    processes: Processes = ALONE,
    *,
    memory: int = 0,
    on_step: OnStep | None = None,
) -> Run:
    """Train from `state` to the run's last step; report events from Started to Finished.

    The `clock` of rank 0 ends a run with a budget; the returned run says how many steps were made.
    `take_snapshot` is called at each evaluation, `on_step` after each step. Started reports the
    estimated `memory`. A signal to one process stops all processes. Rank 0 writes the files, but
    if the model is sharded, each process writes its own rows. Raises AttnlmError if numbers are no
    longer finite or a file can't be written, and LostProcessError if another process has ended or
    does not answer. After a signal, saves the run if a step was made, then raises Interrupted.
    """
    with keeping_random_state(state.device):
        stepper = Stepper(state, run.config, dataset, processes, clock)
        with stepper.stop.listening():
            loop = _Loop(run, dataset, stepper, on_event, take_snapshot)
            try:
                with _explaining(run, state):
                    loop.begin(memory)
                    while loop.goes_on():
                        loss = stepper.step()
                        loop.stepped(loss)
                        if on_step is not None:
                            on_step(state.step, loss)
            except Interrupted:
                if not stepper.stop.raises:
                    with _explaining(run, state):
                        loop.save_stopped()
                    # A launcher stops all processes when the first one ends: wait for rank 0.
                    if not processes.is_main:
                        with contextlib.suppress(LostProcessError):
                            processes.broadcast_object(None)
                raise
    return loop.run


@contextlib.contextmanager
def _explaining(run: Run, state: TrainingState) -> Iterator[None]:
    """Convert StepNotFiniteError, and OSError from writing, to AttnlmError.

    The hint of the AttnlmError says which step of the run is saved.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # from a listener that writes to a closed pipe
    except (StepNotFiniteError, OSError) as error:
        if isinstance(error, OSError):
            message = f"cannot write {error.filename or run.path}: {error.strerror}"
            again = "train it again" if state.saved_step is None else resume_command(run.path)
            hint = f"{remedy(error)}, then: {again}"
        else:
            config, message = run.config.training, f"the {error}"
            hint = f"lower `learning_rate` {config.learning_rate:g}"
            hint += " or add `gradient_clip` 1" * (config.gradient_clip is None)
        saved = f"{run.last} has step {state.saved_step}"
        if state.saved_step is None:
            saved = "the run has no checkpoint yet"
        raise AttnlmError(message, f"{hint}; {saved}") from error


@dataclass
class _Loop:
    """Evaluations, checkpoints and reports of a training run."""

    run: Run
    dataset: Dataset
    stepper: Stepper
    on_event: OnEvent
    take_snapshot: TakeSnapshot | None

    def __post_init__(self) -> None:
        self._state, self._is_main = self.stepper.state, self.stepper.processes.is_main
        self._saver = Saver(self.run, self._state, self.stepper.processes)
        self._validation_loss = functools.partial(
            validation_loss,
            *(self._state.model, self.dataset.val, self._state.device),
            bytes_per_token=self.dataset.bytes_per_token,
            kernels=kernels_of(self._config),
            threads=self._config.threads or 1,
            processes=self.stepper.processes,
            is_sharded=self._config.is_sharded,
            stop=self.stepper.stop,
        )
        self._began = time.perf_counter() - self._state.seconds
        self._evaluation_seconds = self._validation_seconds = self._snapshot_seconds = 0.0
        self._step_began, self._step_seconds = 0.0, math.inf
        self._next_evaluation = _after(self._state.progress)
        self._restart_clock()
        self._report_due = self._since + _SECONDS_BETWEEN_REPORTS

    @property
    def _config(self) -> TrainingConfig:
        return self.run.config.training

    def save_stopped(self) -> None:
        """Save the last complete step of a run that a signal stops."""
        state = self._state
        if not self._saver.is_writer:
            return
        state.seconds = time.perf_counter() - self._began
        state.loss_sum = self.stepper.read_loss_sum()
        self._saver.save()
        self._saver.finish()
        if self._is_main:
            replace(self.run, stopped_after=round(state.seconds, 3)).save_config()

    def begin(self, memory: int) -> None:
        """Choose how many tokens a run with a budget evaluates, then report the start."""
        if self._config.budget is not None and self._config.eval_tokens is None:
            few = evaluated_part(self.run.config, 0.0, self.dataset.val_tokens)
            for _ in range(2):  # the first evaluation is slower than others
                began = time.perf_counter()
                speed = self._validation_loss(most=few).tokens / (time.perf_counter() - began)
            part = evaluated_part(self.run.config, speed, self.dataset.val_tokens)
            self._settle(eval_tokens=self.stepper.processes.broadcast_object(part))
        self._tell(Started(self.run, self._state.device, self._state.step, memory))
        self._restart_clock()
        self._state.model.train()

    def _settle(self, **chosen: Any) -> None:
        """Record settings that were just chosen for a run with a budget."""
        training = replace(self._config, **chosen)
        self.run = replace(self.run, config=replace(self.run.config, training=training))
        if self._is_main:
            self.run.save_config()

    def goes_on(self) -> bool:
        """Evaluate when due; return False after the last step or when patience runs out."""
        state, optimizer = self._state, self._state.optimizer
        self.stepper.stop.check()
        if self._is_evaluation_due():
            due_since = time.perf_counter()
            evaluated = self._evaluate_and_save()
            self._evaluation_seconds = time.perf_counter() - due_since
            if evaluated.step == 0:
                # The first snapshot compiles and times the decoder; later ones do not.
                self._evaluation_seconds -= self._snapshot_seconds
            self._tell(evaluated)
            self._restart_clock()
            if self._config.budget is not None:
                # Evaluate at each tenth of the budget, or less often if that would take too much.
                pause = self._evaluation_seconds / _EVALUATION_FRACTION / self._config.budget
                following = _after(state.progress + max(0.0, pause - 0.1))
                self._next_evaluation = self.stepper.processes.broadcast_object(following)
            self.stepper.stop.check()
        if self._is_over or self._is_out_of_patience:
            self._saver.finish()
            if self._is_over and self._config.budget is not None:
                warmup = min(self._config.warmup, state.step // 4)
                self._settle(steps=state.step, warmup=warmup)
            self.on_event(Finished(self.run, state.step, self._is_out_of_patience))
            return False
        self._step_began = time.perf_counter()
        # The gradient's norm is computed only if a report is likely to follow.
        soon = self._step_began + 2 * self._step_seconds >= self._report_due
        optimizer.wants_norm = soon and self._is_main and not self._config.is_sharded
        return True

    def stepped(self, loss: Tensor) -> None:
        """Record the time of a step, and report the step if a report is due."""
        now, clock = time.perf_counter(), self.stepper.clock
        self._step_seconds = now - self._step_began
        if clock is not None:
            # After the last step follow an evaluation, drawing the curve and, if affordable, the
            # loss over the whole split by `measure_on_whole`. With half a step more, runs end on
            # time on average.
            budget, most = self._config.budget or 0.0, self._config.eval_tokens or 0
            clock.closing = self._evaluation_seconds + self._step_seconds / 2
            clock.closing += min(_CLOSING, _CLOSING_FRACTION * budget)
            steps = int(self.stepper.expected_steps(self._state.step) or 0)
            whole = min(self.dataset.val_tokens - 1, MOST_TOKENS)
            if 0 < most < whole and is_whole_affordable(self.run.config, whole, steps, 1):
                clock.closing += self._validation_seconds * whole / most
        if self._is_main and now >= self._report_due:
            self._report(loss)

    @property
    def _is_over(self) -> bool:
        state, steps = self._state, self._config.steps
        if self._config.budget is not None:
            return state.progress >= 1 and state.step > 0
        assert steps is not None
        return state.step >= steps

    @property
    def _is_out_of_patience(self) -> bool:
        return self._config.patience is not None and self._state.stale >= self._config.patience

    def _is_evaluation_due(self) -> bool:
        state, config, every = self._state, self._config, self._config.eval_every
        if state.step == state.evaluated_step:
            return False
        if state.step == 0 and every is not None and every >= (config.steps or math.inf):
            return False  # the only evaluation is the last step's
        if every is None:
            return state.step == 0 or state.progress >= self._next_evaluation
        return state.step % every == 0 or self._is_over

    def _restart_clock(self) -> None:
        self._since_step, self._since = self._state.step, time.perf_counter()

    def _tokens_per_second(self) -> float:
        steps = self._state.step - self._since_step
        return steps * self.run.config.tokens_per_step / (time.perf_counter() - self._since)

    def _report(self, loss: Tensor) -> None:
        config, step = self._config, self._state.step
        began = time.perf_counter()
        self.stepper.check_loss()
        speed, steps = self._tokens_per_second(), self.stepper.expected_steps(step)
        if self.stepper.clock is not None:
            left = max(0.0, self.stepper.clock.ends - began)
        else:
            assert config.steps is not None and config.eval_every is not None
            steps_left = config.steps - step
            left = steps_left * self.run.config.tokens_per_step / speed
            left += math.ceil(steps_left / config.eval_every) * self._evaluation_seconds
        norm = self._state.optimizer.norm
        gradient_norm = None if norm is None else norm.item()
        cost = time.perf_counter() - began
        self._report_due = began + max(_SECONDS_BETWEEN_REPORTS, cost / _REPORT_FRACTION)
        rate = learning_rate(step, config, steps)
        total = config.steps if steps is None else round(steps)
        self._tell(Stepped(step, loss.item(), speed, left, gradient_norm, rate, total))

    def _tell(self, event: Started | Evaluated | Stepped) -> None:
        """Report an event. The time that listeners take for it does not count as the run's time."""
        began = time.perf_counter()
        self.on_event(event)
        spent = time.perf_counter() - began
        self._began += spent
        self._since += spent

    def _evaluate_and_save(self) -> Evaluated:
        """Evaluate, then write the metrics, the snapshot and the checkpoints."""
        state, run = self._state, self.run
        check_unchanged(self.dataset.train)
        loss_sum = self.stepper.read_loss_sum()  # waits for a GPU, before the clock is read
        tokens_per_second = self._tokens_per_second()
        with folded(state.model):
            began = time.perf_counter()
            evaluation = self._validation_loss(most=self._config.eval_tokens)
            self._validation_seconds = time.perf_counter() - began
            if not math.isfinite(evaluation.loss):
                raise StepNotFiniteError(
                    f"validation loss is no longer a finite number, at step {state.step}"
                )
            began = time.perf_counter()
            model: LanguageModel | None = state.model
            device, taken = state.device, None
            if self._config.is_sharded:  # rank 0 gathers the model
                device = Device("cpu", "float32", "gathered")
                model = whole_model(state.model, self.stepper.processes)
            if self.take_snapshot is not None and model is not None:
                taken = self.take_snapshot(state.step, model, device)
            self._snapshot_seconds = time.perf_counter() - began
        new_steps = state.step - max(0, state.evaluated_step)
        improved = evaluation.loss < state.best_loss
        state.evaluated(evaluation.loss)
        self.stepper.reset_loss_sum()
        state.seconds = time.perf_counter() - self._began
        steps = self.stepper.expected_steps(state.step)
        record = EvaluationRecord(
            step=state.step,
            tokens=state.step * run.config.tokens_per_step,
            seconds=round(state.seconds, 3),
            train_loss=loss_sum / new_steps if new_steps else None,
            val_loss=evaluation.loss,
            evaluated_tokens=evaluation.tokens,
            bits_per_byte=evaluation.bits_per_byte,
            learning_rate=learning_rate(state.step, self._config, steps),
            tokens_per_second=round(tokens_per_second),
        )
        if taken is not None:
            run.append_evaluation(record, *taken)
        if self._saver.is_writer:
            self._saver.save(evaluation.loss if improved else None)
        is_last = self._is_over or self._is_out_of_patience
        snapshot = taken and taken[0]
        return Evaluated(**record, improved=improved, snapshot=snapshot, is_last=is_last)


def _after(progress: float) -> float:
    """Return the progress at the next evaluation: the next multiple of 0.1, at most 1."""
    return min(1.0, (math.floor(10 * progress + 1e-6) + 1) / 10)
