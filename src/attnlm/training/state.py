"""The state of a training run: made, read from a checkpoint, and saved as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.base.setting_fields import record_from_json
from attnlm.compute.device import Device
from attnlm.compute.processes import ALONE, Processes
from attnlm.config.settings import Config
from attnlm.model.building import load_buffers, stored_buffers
from attnlm.model.language_model import LanguageModel
from attnlm.runs.checkpoint import Array, load_checkpoint, save_checkpoint
from attnlm.runs.journal import ranking_key
from attnlm.runs.load_model import parent_weights
from attnlm.runs.records import CheckpointFacts
from attnlm.runs.run import COPY_THE_RUN, Run
from attnlm.training.optimizer import Optimizer
from attnlm.training.random_state import keeping_random_state, seed_generators


@dataclass(kw_only=True)
class TrainingState(CheckpointFacts):
    """The state that changes from step to step, and the device. Only its methods change it."""

    model: LanguageModel
    optimizer: Optimizer
    device: Device
    seconds: float = 0.0
    """Wall time of the run before this process, including evaluations and saving, but without the
    time of listeners. Checkpoints do not have this field."""
    saved_step: int | None = None
    """The step of the last checkpoint on disk."""

    def record_evaluation(self, loss: float, accuracy: float | None = None) -> bool:
        """Record an evaluation of the current weights; return True if it is the best.

        If `accuracy` is given, a higher accuracy is better, and of equal ones the lower loss.
        """
        improved = ranking_key(loss, accuracy) < ranking_key(self.best_loss, self.best_accuracy)
        if improved:
            self.best_loss = loss
            self.best_accuracy = accuracy
            self.best_step = self.step
            self.stale = 0
        else:
            self.stale += 1
        self.evaluated_step = self.step
        self.loss_sum, self.counted_steps = 0.0, 0
        return improved


def initial_state(config: Config, vocab_size: int, device: Device) -> TrainingState:
    """Return the state before the first step; the weights are drawn from the seed."""
    training = config.training
    assert training.seed is not None
    with keeping_random_state(device):
        seed_generators(training.seed)
        model = config.spec.build(vocab_size).to(device.torch)
        optimizer = Optimizer(model, training)
    return TrainingState(model=model, optimizer=optimizer, device=device)


def load_or_init_state(
    run: Run, device: Device, fresh: bool, processes: Processes = ALONE
) -> TrainingState:
    """Return the state to train from: the initial state if `fresh`, else the last checkpoint's.

    All processes get the same state. If a fresh run starts from the weights of another run, its
    parent, the state has the parent's weights. Only rank 0 reads the state. Raises AttnlmError if a
    file is missing or damaged.
    """
    config = run.config
    saved = None
    if processes.is_main and not fresh:
        saved = load_checkpoint(run.last, config.spec, run.vocab_size)
    state = initial_state(config, run.vocab_size, device)
    if processes.is_main and fresh and run.parent is not None:
        _load(parent_weights(run, run.parent), state)
    if saved is not None:
        state = _restore(run, state, *saved)
    return _broadcast(state, processes)


def _restore(
    run: Run,
    state: TrainingState,
    facts: Mapping[str, Any],
    weights: Mapping[str, Array],
    means: Mapping[str, Array],
) -> TrainingState:
    """Return the state with the content of the run's last checkpoint. Raises AttnlmError."""
    if state.optimizer.state().keys() != means.keys():
        raise AttnlmError(
            f"{run.last} does not contain the state that config.json describes", COPY_THE_RUN
        )
    _copy(means, state.optimizer.state())
    _load(weights, state)
    saved = record_from_json(CheckpointFacts, facts, run.last, COPY_THE_RUN)
    evaluations = run.evaluations_until(saved.evaluated_step)
    return replace(
        state,
        **vars(saved),
        seconds=max([run.stopped_after, *(record.seconds for record in evaluations)]),
        saved_step=saved.step,
    )


def _broadcast(state: TrainingState, processes: Processes) -> TrainingState:
    """Return the state with the numbers of rank 0's, and fill the tensors with rank 0's own."""
    if processes.count == 1:
        return state
    state = replace(state, **processes.broadcast_object(state.content()))
    optimizer = state.optimizer
    for named in (optimizer.parameters(), optimizer.state()):
        for tensor in named.values():
            processes.broadcast(tensor)
    buffers = {name: buffer.cpu() for name, buffer in stored_buffers(state.model).items()}
    load_buffers(state.model, processes.broadcast_object(buffers))
    return state


def _load(weights: Mapping[str, Array], state: TrainingState) -> None:
    _copy(weights, state.optimizer.parameters())
    load_buffers(state.model, weights)


def _copy(source: Mapping[str, Array], into: Mapping[str, Tensor]) -> None:
    for name, values in into.items():
        values.copy_(torch.as_tensor(source[name]))


def save_state(run: Run, state: TrainingState, best_loss: float | None = None) -> None:
    """Write the best checkpoint if `best_loss` is given, then the last one. Raises OSError."""
    weights = state.optimizer.weights()
    if best_loss is not None:
        facts_of_best = CheckpointFacts(step=state.step, val_loss=best_loss).content()
        save_checkpoint(run.best, weights, facts_of_best)
    save_checkpoint(run.last, weights, state.content(), state.optimizer.state())
    state.saved_step = state.step
