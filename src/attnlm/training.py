"""The training loop: batches → loss → update, evaluated and saved as it goes. It never prints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.batches import Batches, step_seed
from attnlm.checkpoint import load_checkpoint, save_checkpoint
from attnlm.config import Config, TrainingConfig
from attnlm.dataset import Dataset
from attnlm.device import Device
from attnlm.errors import AttnlmError
from attnlm.evaluation import validation_loss
from attnlm.events import OnEvent
from attnlm.folders import command_for
from attnlm.interruption import Interrupted, Interruption
from attnlm.memory import estimate_memory
from attnlm.model import LanguageModel, build_model, cross_entropy
from attnlm.moments import passage_texts, take_moment
from attnlm.one_layer import written_out
from attnlm.optimizer import Optimizer, learning_rate_factor
from attnlm.run import Run
from attnlm.ticker import Moment

_SECONDS_BETWEEN_REPORTS = 0.1


@dataclass(frozen=True)
class Started:
    """The run in `run.path` is about to make step `first_step` + 1."""

    run: Run
    device: Device
    first_step: int
    memory: int
    """Bytes that it will take, about."""


@dataclass(frozen=True)
class Stepped:
    """Reported a few times a second, with the newest batch's loss in nats per token.

    `seconds_left` is for the steps to come and their evaluations, at the pace of the latest ones.
    """

    step: int
    loss: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Evaluated:
    """An evaluation was made and is on disk; `record` is its line of metrics.jsonl."""

    record: dict[str, Any]
    improved: bool
    moment: Moment | None = field(default=None, repr=False)
    """What the model said and saw then."""


@dataclass(frozen=True)
class Finished:
    """The run ended at its last step, or before it since patience ran out."""

    run: Run
    step: int
    out_of_patience: bool


@dataclass
class TrainingState:
    """What changes from step to step: saved with the weights, all but the device."""

    model: LanguageModel
    optimizer: Optimizer
    device: Device
    step: int = 0
    evaluated_step: int = -1
    """The step of the newest evaluation; −1 before there is one."""
    best_step: int = 0
    best_loss: float = math.inf
    stale: int = 0
    """Evaluations since the best one."""
    loss_sum: float = 0.0
    """Of the training losses since the newest evaluation."""
    seconds: float = 0.0
    """Wall time of the run, evaluations and saving included. Not saved with the weights."""
    saved_step: int | None = None
    """The step of the last checkpoint on disk."""

    def facts(self) -> dict[str, Any]:
        """What is saved beside the tensors. Batches and dropout follow from seed and step."""
        return {name: getattr(self, name) for name in _FACTS}


_FACTS = ("step", "evaluated_step", "best_step", "best_loss", "stale", "loss_sum")


def keeping_random_state(device: Device) -> contextlib.AbstractContextManager[None]:
    """Gives the caller's random state back afterwards, that of the device too."""
    return torch.random.fork_rng([device.torch] if device.name == "cuda" else [])


def initial_state(config: Config, vocab_size: int, device: Device) -> TrainingState:
    """The state before the first step; the weights follow from the seed."""
    assert config.training.seed is not None
    with keeping_random_state(device):
        torch.manual_seed(config.training.seed)
        model = build_model(config.model, vocab_size).to(device.torch)
    return TrainingState(model, Optimizer(model, config.training), device)


def saved_state(run: Run, device: Device) -> TrainingState:
    """The state that the run's last checkpoint holds. Raises AttnlmError as reading it does."""
    model, facts, tensors = load_checkpoint(run.last, run.config.model, run.vocab_size)
    model.to(device.torch)
    optimizer = Optimizer(model, run.config.training)
    state = TrainingState(model, optimizer, device)
    known = all(type(facts.get(name)) is type(getattr(state, name)) for name in _FACTS)
    older = facts.get("seconds", 0.0)  # which is where older versions kept them
    known = known and type(older) is float and _fit_together(facts)
    if not known or optimizer.state().keys() != tensors.keys():
        raise AttnlmError(
            f"{run.last} does not hold the state that its run describes",
            "copy the run's folder again from where it came",
        )
    optimizer.load_state(tensors)
    saved = {name: facts[name] for name in _FACTS}
    records = run.metrics_until(facts["evaluated_step"])
    seconds = max([older, run.stopped_after, *(record["seconds"] for record in records)])
    return replace(state, **saved, seconds=seconds, saved_step=facts["step"])


def _fit_together(facts: Mapping[str, Any]) -> bool:
    """Whether facts of the right types are those of a run: steps in order, sums in float32."""
    return (
        -1 <= facts["evaluated_step"] <= facts["step"]
        and 0 <= facts["best_step"] <= max(0, facts["evaluated_step"])
        and not math.isnan(facts["best_loss"])
        and facts["stale"] >= 0
        and abs(facts["loss_sum"]) <= torch.finfo(torch.float32).max
        and 0 <= facts.get("seconds", 0.0) < math.inf
    )


def training_batches(config: Config, dataset: Dataset) -> Batches:
    """The batches that a configuration asks for."""
    training = config.training
    assert training.seed is not None
    stride = None if training.sampling == "random" else training.stride or config.model.block_size
    return Batches(
        dataset.train,
        block_size=config.model.block_size,
        batch_size=training.batch_size,
        stride=stride,
        seed=training.seed,
        vocab_size=dataset.vocab_size,
    )


class _NotFiniteError(Exception):
    """Numbers have become NaN or infinite: which, and after which step."""


class Stepper:
    """One training step after another: everything that a step needs, held ready."""

    def __init__(self, state: TrainingState, config: Config, dataset: Dataset) -> None:
        self.state, self.config = state, config.training
        self.batches = training_batches(config, dataset)
        self._backpropagate = _backpropagation(state, self.config)
        self._draws = bool(config.model.dropout)
        self._loss_sum = torch.full((), state.loss_sum, device=state.device.torch)
        self._sound_step = state.step

    def step(self, interruption: Interruption) -> Tensor:
        """Makes the next step and returns its loss, a tensor () still on the device."""
        state = self.state
        if self._draws:
            torch.manual_seed(step_seed(self.batches.seed, state.step))
        inputs_BT, targets_BT = (_on(array, state.device) for array in self.batches(state.step))
        loss = self._backpropagate(inputs_BT, targets_BT)
        with interruption.shield():
            state.optimizer.step(state.step)
            self._loss_sum += loss
            state.step += 1
        return loss

    def read_loss_sum(self) -> float:
        """The sum of losses since the newest evaluation.

        Raises _NotFiniteError unless it, the weights and the optimizer's state are finite.
        """
        total = self._loss_sum.item()
        wrong = [] if math.isfinite(total) else ["loss"]
        if wrong := wrong + self.state.optimizer.not_finite():
            raise _NotFiniteError(self._when(wrong))
        self._sound_step = self.state.step
        return total

    def _when(self, wrong: list[str]) -> str:
        first, last = self._sound_step + 1, self.state.step
        when = f"at step {last}" if first >= last else f"between steps {first} and {last}"
        names = " and ".join(filter(None, [", ".join(wrong[:-1]), wrong[-1]]))
        are = "is no longer a finite number" if len(wrong) == 1 else "are no longer finite numbers"
        return f"{names} {are}: it happened {when}"

    def reset_loss_sum(self) -> None:
        """Starts a new mean."""
        self._loss_sum.zero_()


Backpropagation = Callable[[Tensor, Tensor], Tensor]


def _backpropagation(state: TrainingState, config: TrainingConfig) -> Backpropagation:
    """Inputs and targets, each (B, T) → their loss; the gradients are added to the parameters'."""
    model = state.model
    if config.compile != "on":
        form = written_out(model, config.batch_size, state.device, config.compile)
        if form is not None:
            return form
    compute_loss = torch.compile(_loss) if config.compile == "on" else _loss

    def backpropagate(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with state.device.autocast():
            loss = compute_loss(model, inputs_BT, targets_BT)
        loss.backward()
        return loss.detach()

    return backpropagate


def _loss(model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return cross_entropy(model(inputs_BT), targets_BT)


def _on(array: NDArray[np.int64], device: Device) -> Tensor:
    return torch.from_numpy(array).to(device.torch, non_blocking=True)


def fit(run: Run, dataset: Dataset, state: TrainingState, on_event: OnEvent) -> None:
    """Trains from `state` to the run's last step, reporting Started to Finished.

    Raises AttnlmError when numbers are no longer finite or can't be saved; Interrupted, after
    saving, on a signal, and without saving on a second one.
    """
    interruption = Interruption()
    memory = estimate_memory(
        run.config, run.vocab_size, run.parameters, run.dataset["val_tokens"], state.device.name
    )
    on_event(Started(run, state.device, state.step, memory.total))
    with keeping_random_state(state.device), interruption.listen():
        stepper = Stepper(state, run.config, dataset)
        began = time.perf_counter() - state.seconds
        try:
            with _explaining(run, state):
                _steps_and_evaluations(run, dataset, stepper, began, interruption, on_event)
        except Interrupted as stop:
            interruption.answered = True
            if stop.at_once:
                raise
            state.seconds = time.perf_counter() - began
            with _explaining(run, state):
                state.loss_sum = stepper.read_loss_sum()
                _save_last(run, stepper)
                replace(run, stopped_after=round(state.seconds, 3)).save_config()
            raise


@contextlib.contextmanager
def _explaining(run: Run, state: TrainingState) -> Iterator[None]:
    """Turns numbers and disks that fail into AttnlmError, which tells what is left of the run."""

    def left() -> str:
        if state.saved_step is None:
            return "the run has no checkpoint yet"
        return f"{run.last} keeps step {state.saved_step}"

    try:
        yield
    except _NotFiniteError as failure:
        config = run.config.training
        lower = f"lower --learning-rate {config.learning_rate:g}"
        if config.gradient_clip is None:
            lower += " or give --gradient-clip 1"
        raise AttnlmError(f"the {failure}", f"{lower}; {left()}") from None
    except BrokenPipeError:
        raise  # of whoever listens to us
    except OSError as error:
        raise AttnlmError(
            f"can't write {error.filename or run.path}: {error.strerror}",
            f"make room, then: {command_for('attnlm train --resume', run.path)}; {left()}",
        ) from error


def _save_last(run: Run, stepper: Stepper) -> None:
    state = stepper.state
    save_checkpoint(run.last, state.model, state.facts(), state.optimizer)
    state.saved_step = state.step


def _steps_and_evaluations(
    run: Run,
    dataset: Dataset,
    stepper: Stepper,
    began: float,
    interruption: Interruption,
    on_event: OnEvent,
) -> None:
    state, config = stepper.state, run.config.training
    assert config.steps is not None and config.eval_every is not None
    state.model.train()
    tokens_per_step = config.batch_size * run.config.model.block_size
    since_step, since = state.step, time.perf_counter()
    reported, evaluation = since, 0.0
    while True:
        due = state.step % config.eval_every == 0 or state.step == config.steps
        if state.step == 0 and config.eval_every >= config.steps:
            due = False  # one evaluation was asked for, and it is the last step's
        if due and state.evaluated_step != state.step:
            due_since = time.perf_counter()
            speed = (state.step - since_step) * tokens_per_step / (due_since - since)
            _evaluate_and_save(run, dataset, stepper, began, speed, interruption, on_event)
            since_step, since = state.step, time.perf_counter()
            evaluation = since - due_since
        out_of_patience = config.patience is not None and state.stale >= config.patience
        if state.step >= config.steps or out_of_patience:
            on_event(Finished(run, state.step, out_of_patience))
            return
        loss = stepper.step(interruption)
        now = time.perf_counter()
        if now - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = now
            stepper.read_loss_sum()
            rate = (state.step - since_step) / (now - since)
            steps_left = config.steps - state.step
            left = steps_left / rate + math.ceil(steps_left / config.eval_every) * evaluation
            on_event(Stepped(state.step, loss.item(), rate * tokens_per_step, left))


def _evaluate_and_save(
    run: Run,
    dataset: Dataset,
    stepper: Stepper,
    began: float,
    tokens_per_second: float,
    interruption: Interruption,
    on_event: OnEvent,
) -> None:
    """Evaluates, then puts metrics, ticker, best and last on disk before anyone can interrupt."""
    state, config = stepper.state, run.config.training
    loss_sum = stepper.read_loss_sum()
    evaluation = validation_loss(
        state.model,
        dataset.val,
        state.device,
        bytes_per_token=dataset.bytes_per_token,
        compile=config.compile,
    )
    if not math.isfinite(evaluation.loss):
        raise _NotFiniteError(f"validation loss is no longer a finite number, at step {state.step}")
    moment = take_moment(state.step, state.model, dataset, state.device)
    passage = passage_texts(state.model, dataset)
    new_steps = state.step - max(0, state.evaluated_step)
    learning_rate = config.learning_rate * learning_rate_factor(max(0, state.step - 1), config)
    improved = evaluation.loss < state.best_loss
    with interruption.shield():
        state.stale = 0 if improved else state.stale + 1
        if improved:
            state.best_loss, state.best_step = evaluation.loss, state.step
        state.evaluated_step = state.step
        state.loss_sum = 0.0
        stepper.reset_loss_sum()
        state.seconds = time.perf_counter() - began
        record = {
            "step": state.step,
            "tokens": state.step * config.batch_size * run.config.model.block_size,
            "seconds": round(state.seconds, 3),
            "train_loss": loss_sum / new_steps if new_steps else None,
            "val_loss": evaluation.loss,
            "bits_per_byte": evaluation.bits_per_byte,
            "learning_rate": learning_rate,
            "tokens_per_second": round(tokens_per_second),
        }
        run.append_evaluation(record, moment, passage)
        facts = {"step": state.step, "val_loss": evaluation.loss}
        if improved:
            save_checkpoint(run.best, state.model, facts)
        _save_last(run, stepper)
    on_event(Evaluated(record, improved, moment))
