"""A trial of own code before the first step: which divisions of a batch would change its result?"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnlm.base.own_code import OwnCode
from attnlm.compute.device import Device
from attnlm.config.settings import Config
from attnlm.model.inspection import are_close, draw_zeros, restoring, stored_buffers
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drop_by
from attnlm.model.own_parts import on_device_of, require_shape
from attnlm.training.random_state import keeping_random_state, seed_generators

TRIED_WINDOWS = slice(4)
"""The windows of the whole batch with which own code is tried: the same ones in all processes."""
_MOST_LOGITS = 2**22  # of a trial
_ROUNDING = 1e-5
"""The relative difference of two results in float32 that rounding may explain."""


class Trial(NamedTuple):
    """The divisions of a batch that own code allows."""

    may_replicate: bool
    """False if it draws random numbers or changes buffers: replicas in threads would draw from one
    generator, and change different buffers"""
    is_mean: bool = True
    """False if the user's loss of a batch is not the mean of the losses of its parts"""
    is_separate: bool = True
    """False if the logits of a text depend on the other texts of its batch"""
    keeps_buffers: bool = True
    """False if training changes buffers that are recorded: parts of a batch would change others"""

    def why_whole(self, config: Config) -> str:
        """Return why a batch must be computed whole; "" if it may be divided."""
        if not self.is_separate:
            return f"the texts of a batch change each other in {config.spec.name}"
        if not self.keeps_buffers:
            return f"{config.spec.name} changes its buffers or parameters itself"
        loss = config.training.loss
        return "" if self.is_mean else f"the loss {loss} of a batch is not the mean of its parts"


def try_own_code(
    config: Config,
    model: LanguageModel,
    device: Device,
    inputs: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> Trial:
    """Try own code with some windows, (windows, T) each. The model and all generators stay."""
    trial = try_division(config, model, device, inputs, targets)
    if device.name == "cpu":  # other devices have no replicas
        with keeping_random_state(device, config):
            may_replicate = _may_replicate(config, model, inputs[:1])
        trial = trial._replace(may_replicate=may_replicate and trial.may_replicate)
    return trial


def try_division(
    config: Config,
    model: LanguageModel,
    device: Device,
    inputs: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> Trial:
    """Do as `try_own_code`, but leave out whether threads may have replicas of the model."""
    trial = _try_loss(config, model.vocab_size, device, inputs, targets)
    return trial._replace(
        is_separate=not mixes_texts(config, model, device, inputs),
        keeps_buffers=not _changes_buffers(config, model, device, inputs[:1]),
    )


def mixes_texts(
    config: Config, model: LanguageModel, device: Device, inputs: NDArray[np.int64]
) -> bool:
    """Return True if the logits of a text depend on the other texts of its batch.

    Training is tried and, if the model draws random numbers there, evaluation.
    """
    if not config.spec.codes or len(inputs) < 2:
        return False
    ids_BT = torch.from_numpy(inputs).to(device.torch)
    is_training = True

    def logits(texts: int = len(inputs)) -> Tensor:
        """Return the logits of the first text among `texts`."""
        with restoring(model), torch.no_grad(), on_device_of(ids_BT):
            draw_zeros(model)
            drop_by(model, ())
            return model.train(is_training)(ids_BT[:texts])[0].clone()  # type: ignore[no-any-return]

    with keeping_random_state(device, config), contextlib.suppress(Exception):
        together, is_drawn, _ = _call_twice(logits, config)
        if is_drawn:
            is_training = False
            together, is_drawn, _ = _call_twice(logits, config)
        seed_generators(0, config)
        is_known = not is_drawn and bool(together.isfinite().all())
        return is_known and not are_close(logits(1), together)
    return False  # the first step raises the error again


def _changes_buffers(
    config: Config, model: LanguageModel, device: Device, inputs: NDArray[np.int64]
) -> bool:
    """Return True if training, or an evaluation, changes a buffer that is recorded.

    So does training that changes parameters each time; a limit, as of clamp_, is kept the 2nd time.
    """
    ids_BT = torch.from_numpy(inputs).to(device.torch)
    before = {name: buffer.clone() for name, buffer in stored_buffers(model).items()}
    with keeping_random_state(device, config), contextlib.suppress(Exception), restoring(model):
        seed_generators(0, config)
        with torch.no_grad(), on_device_of(ids_BT):
            drop_by(model, ())
            model.eval()(ids_BT)
            model.train()(ids_BT)
            parameters = [(p, p.clone()) for p in model.parameters() if p.numel()]
            model(ids_BT)
        is_moving = any(_differs(once, p) for p, once in parameters)
        return is_moving or not _are_equal(before, stored_buffers(model))
    return False  # the first step raises the error again


def _are_equal(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(
        after[name].dtype == buffer.dtype and after[name].equal(buffer)
        for name, buffer in before.items()
    )


def _may_replicate(config: Config, model: LanguageModel, inputs: NDArray[np.int64]) -> bool:
    """Return True if the model can be copied, draws nothing, and keeps its buffers."""
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return False  # copies of parameters are without their hooks
    try:
        copied = copy.deepcopy(model).train()
    except Exception:  # noqa: BLE001 - own code may raise anything
        return False
    for parameter in copied.parameters():
        if not parameter.any():
            nn.init.normal_(parameter)  # zeros, as in an LM head, would hide what is drawn
    before = {name: buffer.clone() for name, buffer in copied.named_buffers()}

    def logits() -> Tensor:
        drop_by(copied, [torch.Generator().manual_seed(0) for _ in inputs])  # in our own layers
        return copied(torch.from_numpy(inputs)).detach()  # type: ignore[no-any-return]

    _, is_drawn, has_moved = _call_twice(logits, config)
    is_kept = _are_equal(before, dict(copied.named_buffers()))
    return is_kept and not is_drawn and not has_moved


def _try_loss(
    config: Config,
    vocab_size: int,
    device: Device,
    inputs: NDArray[np.int64],
    targets: NDArray[np.int64],
) -> Trial:
    """Try an own loss on drawn logits, since those of a new model may all be equal.

    It may divide a batch if it draws nothing, and equals the mean over two halves of the windows,
    weighted by their counted targets. Of a loss that draws, halves tell nothing.
    """
    code = config.training.loss
    if not isinstance(code, OwnCode) or len(inputs) < 2:
        return Trial(may_replicate=True)
    own = code.check_call({})
    length = inputs.shape[1]
    half = 2 if len(inputs) > 3 and 4 * length * vocab_size <= _MOST_LOGITS else 1
    length = min(length, max(1, _MOST_LOGITS // (2 * half * vocab_size)))
    ids_BT, targets_BT = (torch.from_numpy(x[: 2 * half, :length]) for x in (inputs, targets))
    logits_BTV = torch.randn(*ids_BT.shape, vocab_size, generator=torch.Generator())
    # A low loss in one half and a high one in the other find bends, such as (loss - b).abs() + b.
    logits_BTV[:half].scatter_add_(
        2, targets_BT[:half, :, None].clamp(min=0), torch.full((half, length, 1), 10.0)
    )
    batch = [x.to(device.torch) for x in (logits_BTV, ids_BT, targets_BT)]
    batch[0].requires_grad_()

    def loss_of(rows: slice = slice(None)) -> Tensor:
        with on_device_of(batch[0]):
            loss = own(*(x[rows].clone() for x in batch))
        return require_shape(code, loss, ()).detach()

    def mean_of_halves() -> Tensor:
        mean = torch.zeros_like(whole)
        for rows in (slice(half), slice(half, None)):
            counted = (targets_BT[rows] >= 0).sum() / (targets_BT >= 0).sum()
            if counted:  # otherwise its loss may be 0 / 0, and training leaves it out
                seed_generators(0, config)
                mean += counted.to(mean.device) * loss_of(rows)
        return mean

    with keeping_random_state(device, config):
        try:
            whole, is_drawn, has_moved = _call_twice(loss_of, config)
        except Exception:  # noqa: BLE001 - the first step raises it again
            return Trial(may_replicate=False)
        if is_drawn:
            return Trial(may_replicate=False)
        try:
            is_mean = not _differs(whole, mean_of_halves())
        except Exception:  # noqa: BLE001 - it needs the whole batch
            is_mean = False
    return Trial(not has_moved, is_mean)


def _call_twice(compute: Callable[[], Tensor], config: Config) -> tuple[Tensor, bool, bool]:
    """Return a result, whether another seed gives another one, and whether a generator moved.

    The result may also depend on a generator or a count of the code's own.
    """
    results = []
    has_moved = False
    for seed in (1, 0):
        seed_generators(seed, config)
        before = _generators()
        results.append(compute())
        has_moved |= before != _generators()
    return results[1], _differs(*results), has_moved


def _generators() -> tuple[object, ...]:
    """Return the states of the generators that `seed_generators` seeds, of PyTorch the CPU's."""
    # NumPy's text has the place among its numbers, and some of these.
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return True if a is finite, and rounding does not explain that b is not equal."""
    tolerance = max(_ROUNDING, 2 * torch.finfo(a.dtype).eps)
    is_near = (a - b).abs().max() <= tolerance * a.abs().max()
    return bool(a.isfinite().all()) and not is_near
