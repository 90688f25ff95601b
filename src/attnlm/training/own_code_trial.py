"""A trial of own code, which leaves no trace: may a batch be divided, and do later tokens leak?"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from attnlm.base.own_code import OwnCodeError
from attnlm.compute.device import Device
from attnlm.model.inspection import are_close, draw_zeros, restoring
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drop_by
from attnlm.model.own_parts import on_device_of
from attnlm.training.random_state import keeping_random_state, seed_generators

TRIED_WINDOWS = slice(4)
"""The windows of the whole batch with which own code is tried: the same ones in all processes."""
_MOST_LOGITS = 2**22  # of a trial
_ROUNDING = 1e-5
"""The relative difference of two results in float32 that rounding may explain."""
_MOST_TOKENS = 2**12  # of a batch that is searched for leaks
_LEAK = 2e-5
"""A causal model's logits change by less, as a fraction of the largest, by rounding alone."""


class Trial(NamedTuple):
    """The divisions of a batch that own code allows."""

    may_replicate: bool
    """False if it draws random numbers or changes buffers: replicas in threads would draw from one
    generator, and change different buffers"""
    why_whole: str = ""
    """why a batch must be computed whole, "" if it may be divided"""


def try_own_code(model: LanguageModel, device: Device, inputs: NDArray[np.int64]) -> Trial:
    """Try own code with some windows, (windows, T). The model and all generators stay.

    Other devices than the CPU have no replicas.
    """
    ids_BT = torch.from_numpy(inputs).to(device.torch)
    name = model.spec.name
    with keeping_random_state(device):
        is_mixing = mixes_texts(model, ids_BT)
        is_changing, is_recorded = _changes_state(model, ids_BT[:1])
        may_replicate = not is_changing and _may_be_copied(model, ids_BT[:1])
    reasons = {
        f"the texts of a batch change each other in {name}": is_mixing,
        f"{name} changes its buffers or parameters itself": is_recorded,
    }
    return Trial(may_replicate, next((why for why, is_so in reasons.items() if is_so), ""))


def logits_of(model: LanguageModel, ids_BT: Tensor, is_training: bool) -> Tensor:
    """Return logits of a model with the parameters of its zeros drawn. The model stays as it is."""
    with restoring(model), torch.no_grad(), on_device_of(ids_BT):
        draw_zeros(model)
        drop_by(model, [torch.Generator().manual_seed(0) for _ in ids_BT if ids_BT.is_cpu])
        return model.train(is_training)(ids_BT).clone()  # type: ignore[no-any-return]


def mixes_texts(model: LanguageModel, ids_BT: Tensor) -> bool:
    """Return True if the logits of a text depend on the other texts of its batch.

    Of a mode in which the model draws random numbers, nothing is known.
    """
    with contextlib.suppress(Exception):  # the first step raises it again
        for is_training in (True, False):
            compute = partial(logits_of, model, ids_BT, is_training)
            together, is_fixed = _call_twice(compute)
            seed_generators(0)
            alone = logits_of(model, ids_BT[:1], is_training)
            is_known = is_fixed and bool(together.isfinite().all())
            if is_known and not are_close(alone, together[:1]):
                return True
    return False


def _changes_state(model: LanguageModel, ids_BT: Tensor) -> tuple[bool, bool]:
    """Return True if the model changes a buffer, and True if it changes what a run records.

    That are some buffers, and parameters that change each time; a limit, as of clamp_, is kept the
    second time.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with contextlib.suppress(Exception), restoring(model):
        seed_generators(0)
        with torch.no_grad(), on_device_of(ids_BT):
            drop_by(model, ())
            model.eval()(ids_BT)
            model.train()(ids_BT)
            parameters = [(p, p.clone()) for p in model.parameters() if p.numel()]
            model(ids_BT)
        after = dict(model.named_buffers())
        changed = before.keys() ^ after.keys() | {
            name
            for name in before.keys() & after.keys()
            if before[name].dtype != after[name].dtype or not before[name].equal(after[name])
        }
        is_moving = any(_differs(once, p) for p, once in parameters)
        return bool(changed), is_moving or not changed.isdisjoint(model.state_dict())
    return False, False  # the first step raises it again


def _may_be_copied(model: LanguageModel, ids_BT: Tensor) -> bool:
    """Return True if a copy computes the same: copies of parameters are without their hooks."""
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return False
    with contextlib.suppress(Exception):
        copy.deepcopy(model)
        return _call_twice(partial(logits_of, model, ids_BT, True))[1]
    return False


def _call_twice(compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """Return a result, and True if it depends on no seed, count or generator, and moves none."""
    results, is_fixed = [], True
    for seed in (1, 0):
        seed_generators(seed)
        before = _generators()
        results.append(compute())
        is_fixed &= before == _generators()
    return results[1], is_fixed and not _differs(*results)


def _generators() -> tuple[object, ...]:
    """Return the states of the generators that `seed_generators` seeds, of PyTorch the CPU's."""
    # NumPy's text has the place among its numbers, and some of these.
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def _differs(a: Tensor, b: Tensor) -> bool:
    """Return True if a is finite, and rounding does not explain that b is not equal."""
    tolerance = max(_ROUNDING, 2 * torch.finfo(a.dtype).eps)
    is_near = (a - b).abs().max() <= tolerance * a.abs().max()
    return bool(a.isfinite().all()) and not is_near


def find_leak(model: LanguageModel, most: int) -> str:
    """Return how later tokens change the logits of an earlier one; "" if none does.

    In random texts of the whole context, all tokens from one on are replaced: from each one or, in
    a long context, from about `most` tokens at random places and near the ends or edges of chunks.
    This is done with two texts and seeds, in evaluation and in training each. Raises
    OwnCodeError if equal texts give different results.
    """
    if (T := model.block_size) < 2:
        return ""
    rows = max(1, min(16, most // 4, _MOST_TOKENS // T, _MOST_LOGITS // (T * model.vocab_size)))
    for seed in range(4):
        if leak := _leak_in(model, most, is_training := seed > 1, seed, rows):
            return f"{'in training, ' * is_training}{leak}"
    return ""


def _first_not_finite(model: LanguageModel, ids_BT: Tensor, is_training: bool) -> str:
    """Return the name of the first registered module whose output has NaN or infinity."""
    found: list[nn.Module] = []

    def look(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append(module)

    with register_module_forward_hook(look):
        logits_of(model, ids_BT, is_training)
    names = {module: name or "the model" for name, module in model.named_modules()}
    return next((names[module] for module in found if module in names), "the model")


def _leak_in(model: LanguageModel, most: int, is_training: bool, seed: int, rows: int) -> str:
    """Return a leak in a random text, of which a batch has `rows` copies with other endings.

    Row by row, draws are the same for a batch of equal shape. A leak counts only if a text has it
    that is computed alone, since the texts of a batch may change each other.
    """
    T, V = model.block_size, model.vocab_size
    generator = torch.Generator().manual_seed(seed)
    first_N = torch.randperm(T - 1, generator=generator)[:most].sort().values + 1
    if most < T - 1:
        parts = 8 if most >= 32 else 1
        edges = (torch.arange(parts + 1) * T // parts)[:, None] + torch.arange(-1, 3)
        first_N = torch.cat((first_N, edges.clamp(1, T - 1).flatten())).unique()

    def repeated(ids_BT: Tensor) -> Tensor:
        logits_BTV, again_BTV = (compute(ids_BT) for _ in range(2))
        if not (logits_BTV - again_BTV).abs().max() <= _LEAK * logits_BTV.abs().max():
            what = "computes other numbers for the same ids"
            hint = "draw by torch, random or numpy.random, which are seeded; count in a buffer"
            if not logits_BTV.isfinite().all():
                first = _first_not_finite(model, ids_BT, is_training)
                what = f"computes NaN or infinity, first in {first}"
                hint = (
                    "look for a division by 0, a logarithm of 0, or a row of scores that are all "
                    "-inf"
                )
            where = " in training" * is_training
            raise OwnCodeError(
                f"{model.spec.name} {what}{where}: whether it sees later tokens is unknown", hint
            )
        return logits_BTV

    def compute(ids_BT: Tensor) -> Tensor:
        seed_generators(seed)
        return logits_of(model, ids_BT, is_training)

    text_BT = torch.randint(V, (1, T), generator=generator).expand(rows, T)
    logits_BTV = repeated(text_BT)
    for first_B in first_N.split(rows):
        # The last batch is as large as the others, too.
        first_B1 = torch.nn.functional.pad(first_B, (0, rows - len(first_B)), value=T)[:, None]
        shift_BT = torch.randint(1, max(2, V), (rows, T), generator=generator)
        is_later_BT = torch.arange(T) >= first_B1
        changed_BT = torch.where(is_later_BT, (text_BT + shift_BT) % V, text_BT)
        change_BT = (compute(changed_BT) - logits_BTV).abs().amax(-1).masked_fill(is_later_BT, 0)
        if change_BT.max() <= _LEAK * logits_BTV.abs().max():
            continue
        if rows > 1:
            return _leak_in(model, most, is_training, seed, 1)
        repeated(changed_BT)
        return (
            f"the logits at token {int(change_BT.argmax()) + 1} change by "
            f"{float(change_BT.max()):.2g} when the later tokens from {int(first_B[0]) + 1} on "
            "change"
        )
    return ""
