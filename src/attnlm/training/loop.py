"""The training loop: batches → loss → update, evaluated and saved as it goes. It never prints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.events import OnEvent
from attnlm.base.files import remedy
from attnlm.base.folders import resume_command
from attnlm.base.signals import Interrupted
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE, Processes
from attnlm.data.dataset import Dataset, check_unchanged
from attnlm.model.language_model import LanguageModel
from attnlm.model.lora import folded
from attnlm.runs.run import Run
from attnlm.runs.ticker import Snapshot
from attnlm.training.deadline import Deadline
from attnlm.training.events import Evaluated, Finished, Replanned, Started, Stepped
from attnlm.training.kernels import kernels_of
from attnlm.training.memory import estimate_memory
from attnlm.training.saving import Saver, ShardedSaver
from attnlm.training.schedule import learning_rate
from attnlm.training.sharding import whole_model
from attnlm.training.state import TrainingState, keeping_random_state
from attnlm.training.step import StepNotFiniteError, Stepper
from attnlm.training.validation import validation_loss

_SECONDS_BETWEEN_REPORTS = 0.1
_REPORT_SHARE = 0.01
"""The largest fraction of the time that reports may take."""

TakeSnapshot = Callable[[int, LanguageModel, Device], tuple[Snapshot, list[str]]]
"""Gives a snapshot of the model at a step, and the tokens that its maps are of."""


def fit(
    run: Run,
    dataset: Dataset,
    state: TrainingState,
    on_event: OnEvent,
    take_snapshot: TakeSnapshot | None = None,
    deadline: Deadline | None = None,
    processes: Processes = ALONE,
) -> Run:
    """Trains from `state` to the run's last step, reporting Started to Finished.

    With a `deadline` the number of steps follows the clock, and the run is returned with the last
    one. `take_snapshot` is called at each evaluation. All processes stop by a signal to one of
    them; the main one writes. Raises AttnlmError when numbers are no longer finite or can't be
    saved; LostProcessError; Interrupted on a signal, after saving if a step was made.
    """
    memory = estimate_memory(
        run.config, run.vocab_size, run.parameters, run.dataset["val_tokens"], state.device.name
    )
    on_event(Started(run, state.device, state.step, memory.total))
    with keeping_random_state(state.device):
        stepper = Stepper(state, run.config, dataset, processes)
        with stepper.stop.listening():
            loop = _Loop(run, dataset, stepper, on_event, take_snapshot, deadline)
            try:
                with _explaining(run, state):
                    loop.steps_and_evaluations()
            except Interrupted:
                if not stepper.stop.raises:
                    with _explaining(run, state):
                        loop.save_stopped()
                    if not processes.is_main:
                        processes.wait_for_main()
                raise
    return loop.run


@contextlib.contextmanager
def _explaining(run: Run, state: TrainingState) -> Iterator[None]:
    """Turns numbers and disks that fail into AttnlmError, which tells what is left of the run."""

    def left() -> str:
        if state.saved_step is None:
            return "the run has no checkpoint yet"
        return f"{run.last} keeps step {state.saved_step}"

    try:
        yield
    except StepNotFiniteError as failure:
        config = run.config.training
        lower = f"lower `learning_rate` {config.learning_rate:g}"
        if config.gradient_clip is None:
            lower += " or give `gradient_clip` 1"
        raise AttnlmError(f"the {failure}", f"{lower}; {left()}") from None
    except BrokenPipeError:
        raise  # of whoever listens to us
    except OSError as error:
        again = "train it again" if state.saved_step is None else resume_command(run.path)
        raise AttnlmError(
            f"can't write {error.filename or run.path}: {error.strerror}",
            f"{remedy(error)}, then: {again}; {left()}",
        ) from error


class _Loop:
    """Steps, evaluations and reports of one training."""

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        stepper: Stepper,
        on_event: OnEvent,
        take_snapshot: TakeSnapshot | None,
        deadline: Deadline | None,
    ) -> None:
        self.run, self._dataset, self._stepper = run, dataset, stepper
        self._deadline = deadline
        self._on_event, self._take_snapshot = on_event, take_snapshot
        self._is_main = stepper.processes.is_main
        self._state, self._config = stepper.state, run.config.training
        kind = ShardedSaver if self._config.shard else Saver
        self._saver = kind(run, self._state, stepper.processes)
        self._tokens_per_step = self._config.batch_size * run.config.model.block_size
        self._began = time.perf_counter() - self._state.seconds
        self._evaluation_seconds, self._step_seconds = 0.0, math.inf
        self._restart_clock()
        self._report_due = self._since + _SECONDS_BETWEEN_REPORTS

    def seconds(self) -> float:
        """Wall time of the run so far."""
        return time.perf_counter() - self._began

    def save_stopped(self) -> None:
        """Saves the last complete step, for a training that ends before its end."""
        state = self._state
        if not self._saver.is_writer:
            return
        state.seconds = self.seconds()
        state.loss_sum = self._stepper.read_loss_sum(together=True)
        self._saver.save()
        self._saver.finish()
        if self._is_main:
            replace(self.run, stopped_after=round(state.seconds, 3)).save_config()

    def steps_and_evaluations(self) -> None:
        """Trains to the last step, or until patience runs out."""
        state = self._state
        state.model.train()
        if self._deadline is not None:
            self._deadline.begin(state.step)
        while True:
            self._stepper.stop.check()
            if self._is_evaluation_due():
                due_since = time.perf_counter()
                evaluated = self._evaluate_and_save()
                self._evaluation_seconds = time.perf_counter() - due_since
                self._tell(evaluated)
                self._restart_clock()
                if self._deadline is not None:
                    self._deadline.evaluated(self._evaluation_seconds)
                self._stepper.stop.check()
            config = self._config
            assert config.steps is not None
            out_of_patience = config.patience is not None and state.stale >= config.patience
            if state.step >= config.steps or out_of_patience:
                self._saver.finish()
                self._on_event(Finished(self.run, state.step, out_of_patience))
                return
            loss = self._step()
            if self._is_main and time.perf_counter() >= self._report_due:
                self._report(loss)
            if self._deadline is not None and self._deadline.is_look_due():
                self._plan_again(self._deadline)

    def _step(self) -> Tensor:
        """The next step's loss; the gradient's norm is noted where a report is likely to follow."""
        began, optimizer = time.perf_counter(), self._state.optimizer
        soon = began + 2 * self._step_seconds >= self._report_due
        optimizer.wants_norm = soon and self._is_main and not self._config.is_sharded
        loss = self._stepper.step()
        self._step_seconds = time.perf_counter() - began
        return loss

    def _plan_again(self, deadline: Deadline) -> None:
        """Lets the number of steps follow the clock; what is planned is recorded first."""
        self._stepper.read_loss_sum()  # a GPU may lag behind
        training = deadline.planned_again(self._config, self._state.step)
        if training is None:
            return
        self.run = replace(self.run, config=replace(self.run.config, training=training))
        self.run.save_config()
        self._config = training
        self._state.optimizer.follow(training)
        self._on_event(Replanned(self.run, self._state.step))

    def _is_evaluation_due(self) -> bool:
        step, config = self._state.step, self._config
        assert config.steps is not None and config.eval_every is not None
        if step == self._state.evaluated_step:
            return False
        if step == 0 and config.eval_every >= config.steps:
            return False  # one evaluation was asked for, and it is the last step's
        return step % config.eval_every == 0 or step == config.steps

    def _restart_clock(self) -> None:
        self._since_step, self._since = self._state.step, time.perf_counter()

    def _tokens_per_second(self) -> float:
        steps = self._state.step - self._since_step
        return steps * self._tokens_per_step / (time.perf_counter() - self._since)

    def _report(self, loss: Tensor) -> None:
        config, step = self._config, self._state.step
        assert config.steps is not None and config.eval_every is not None
        began = time.perf_counter()
        self._stepper.check_loss()
        speed, steps_left = self._tokens_per_second(), config.steps - step
        evaluations_left = math.ceil(steps_left / config.eval_every)
        left = steps_left * self._tokens_per_step / speed
        left += evaluations_left * self._evaluation_seconds
        norm = self._state.optimizer.norm
        measured = None if norm is None else norm.item()
        cost = time.perf_counter() - began + self._state.optimizer.norm_seconds
        self._report_due = began + max(_SECONDS_BETWEEN_REPORTS, cost / _REPORT_SHARE)
        self._tell(Stepped(step, loss.item(), speed, left, measured))

    def _tell(self, event: Evaluated | Stepped) -> None:
        """What listeners do with it, such as drawing a curve, is no time of the training."""
        began = time.perf_counter()
        self._on_event(event)
        spent = time.perf_counter() - began
        self._began += spent
        self._since += spent

    def _snapshot(self) -> tuple[Snapshot, list[str]] | None:
        """None where it is another process that takes it."""
        state, model, device = self._state, self._state.model, self._state.device
        if self._config.is_sharded:
            whole = whole_model(model, self._stepper.processes)
            if whole is None:
                return None
            model, device = whole, Device("cpu", "float32", "gathered")
        if self._take_snapshot is None:
            return None
        return self._take_snapshot(state.step, model, device)

    def _evaluate_and_save(self) -> Evaluated:
        """Evaluate, then write metrics, ticker, best and last."""
        state, run = self._state, self.run
        check_unchanged(self._dataset.train)
        loss_sum = self._stepper.read_loss_sum(together=True)  # a GPU may lag behind
        tokens_per_second = self._tokens_per_second()
        with folded(state.model):
            evaluation = validation_loss(
                state.model,
                self._dataset.val,
                state.device,
                bytes_per_token=self._dataset.bytes_per_token,
                kernels=kernels_of(self._config),
                threads=self._config.threads or 1,
                most=self._config.eval_tokens,
                processes=self._stepper.processes,
                is_sharded=self._config.is_sharded,
                stop=self._stepper.stop,
            )
            if not math.isfinite(evaluation.loss):
                raise StepNotFiniteError(
                    f"validation loss is no longer a finite number, at step {state.step}"
                )
            taken = self._snapshot()
        new_steps = state.step - max(0, state.evaluated_step)
        improved = evaluation.loss < state.best_loss
        state.evaluated(evaluation.loss)
        self._stepper.reset_loss_sum()
        state.seconds = self.seconds()
        record = {
            "step": state.step,
            "tokens": state.step * self._tokens_per_step,
            "seconds": round(state.seconds, 3),
            "train_loss": loss_sum / new_steps if new_steps else None,
            "val_loss": evaluation.loss,
            "evaluated_tokens": evaluation.tokens,
            "bits_per_byte": evaluation.bits_per_byte,
            "learning_rate": learning_rate(state.step, self._config),
            "tokens_per_second": round(tokens_per_second),
        }
        if taken is not None:
            run.append_evaluation(record, *taken)
        if self._saver.is_writer:
            self._saver.save(evaluation.loss if improved else None)
        return Evaluated(record, improved, taken and taken[0])
