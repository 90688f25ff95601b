"""A trial of own code, which leaves no trace: may a batch be divided, and do later tokens leak?

All comparisons are of logits of some ids, computed by the same weights from the same seed. Axes:
B texts, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.base.own_code import OwnCodeError
from attnlm.compute.device import Device
from attnlm.model.building import stored_buffers
from attnlm.model.inspection import are_close, draw_zeros, restoring
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drop_by
from attnlm.model.own_parts import on_device_of
from attnlm.training.random_state import keeping_random_state, seed_generators

TRIED_WINDOWS = slice(4)
"""The windows of the whole batch with which own code is tried: the same ones in all processes."""
_MOST_TEXTS, _MOST_TOKENS, _MOST_LOGITS = 16, 2**12, 2**22
"""of a batch that is searched for leaks"""
_LEAK = 2e-5
"""A causal model's logits change by less, as a fraction of the largest, by rounding alone."""


def logits_of(model: LanguageModel, ids_BT: Tensor, is_training: bool, seed: int = 0) -> Tensor:
    """Return logits (B, T, V) of a model with the parameters of its zeros drawn.

    The model stays as it is; the generators that `seed_generators` seeds do not.
    """
    seed_generators(seed)
    with restoring(model), torch.no_grad(), on_device_of(ids_BT):
        draw_zeros(model)
        drop_by(model, [torch.Generator().manual_seed(0) for _ in ids_BT if ids_BT.is_cpu])
        return model.train(is_training)(ids_BT).clone()  # type: ignore[no-any-return]


# --- May a batch be divided? ----------------------------------------------------------------------


class Trial(NamedTuple):
    """The divisions of a batch that own code allows."""

    may_replicate: bool
    """True if replicas of the model, each in a thread, compute what the model does"""
    why_whole: str = ""
    """why a batch must be computed whole, "" if it may be divided"""


def try_own_code(model: LanguageModel, device: Device, inputs: NDArray[np.int64]) -> Trial:
    """Try own code with some windows, (windows, T). The model and all generators stay.

    Other devices than the CPU have no replicas. Raises what the code raises, except that the first
    step says what memory suffices for.
    """
    ids_BT = torch.from_numpy(inputs).to(device.torch)
    with keeping_random_state(device), contextlib.suppress(torch.OutOfMemoryError):
        if mixes_texts(model, ids_BT):
            why = f"the texts of a batch change each other in {model.spec.name}"
        elif _changes_state(model, ids_BT[:1]):
            why = f"{model.spec.name} changes its buffers or parameters itself"
        else:
            return Trial(not _draws(model, ids_BT[:1]) and _can_be_copied(model))
        return Trial(may_replicate=False, why_whole=why)
    return Trial(may_replicate=False)


def mixes_texts(model: LanguageModel, ids_BT: Tensor) -> bool:
    """Return True if the logits of a text depend on the other texts of its batch.

    Of a mode in which they depend on the seed, nothing is known.
    """
    for is_training in (True, False):
        together, again = (logits_of(model, ids_BT, is_training, seed) for seed in (0, 1))
        alone = logits_of(model, ids_BT[:1], is_training)
        if are_close(again, together) and not are_close(alone, together[:1]):
            return True
    return False


def _changes_state(model: LanguageModel, ids_BT: Tensor) -> bool:
    """Return True if calls change what a checkpoint holds: a buffer, or each time a parameter.

    The first call may make a mask, or keep parameters within limits.
    """
    with restoring(model), torch.no_grad(), on_device_of(ids_BT):
        drop_by(model, ())
        buffers = stored_buffers(model)
        model.eval()(ids_BT)
        model.train()(ids_BT)
        parameters = [(parameter, parameter.clone()) for parameter in model.parameters()]
        model(ids_BT)
        after = stored_buffers(model)
        pairs = [*parameters, *((after.get(name), buffer) for name, buffer in buffers.items())]
        return any(x is None or x.dtype != y.dtype or not x.equal(y) for x, y in pairs)


def _draws(model: LanguageModel, ids_BT: Tensor) -> bool:
    """Return True if training draws numbers, from generators that replicas in threads share or from
    one of its own."""
    seed_generators(0)
    before = _generators()
    once = logits_of(model, ids_BT, is_training=True)
    return before != _generators() or not are_close(logits_of(model, ids_BT, True), once)


def _generators() -> tuple[object, ...]:
    """Return the states of the generators that `seed_generators` seeds, of PyTorch the CPU's."""
    # NumPy's text has the place among its numbers, and some of these.
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def _can_be_copied(model: LanguageModel) -> bool:
    """Return True if a copy computes the same: copies of parameters are without their hooks."""
    if not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        with contextlib.suppress(Exception):
            copy.deepcopy(model)
            return True
    return False


# --- Do later tokens leak? ------------------------------------------------------------------------


def find_leak(model: LanguageModel, most: int) -> str:
    """Return how later tokens change the logits of an earlier one; "" if none does.

    In random texts of the whole context, all tokens from one on are replaced: from each one or, in
    a long context, from about `most` tokens at random places and near the ends or edges of chunks.
    This is done with two texts and seeds, in evaluation and in training each. Raises
    OwnCodeError if equal texts give different results.
    """
    if (T := model.block_size) < 2:
        return ""
    sizes = most // 4, _MOST_TOKENS // T, _MOST_LOGITS // (T * model.vocab_size)
    texts = max(1, min(_MOST_TEXTS, *sizes))
    for seed in range(4):
        is_training = seed > 1
        leak = _leak_in(model, most, is_training, seed, texts)
        if leak and texts > 1:  # the texts of a batch may have changed each other
            leak = _leak_in(model, most, is_training, seed, 1)
        if leak:
            return f"{'in training, ' * is_training}{leak}"
    return ""


def _leak_in(model: LanguageModel, most: int, is_training: bool, seed: int, texts: int) -> str:
    """Return a leak in a random text, of which a batch has copies with other endings.

    All batches have the same shape, for which draws of a seed are the same row by row.
    """
    T, V = model.block_size, model.vocab_size
    generator = torch.Generator().manual_seed(seed)
    text_BT = torch.randint(V, (1, T), generator=generator).expand(texts, T)
    logits_BTV = _repeated_logits(model, text_BT, is_training, seed)
    for first_B in _places(T, most, generator).split(texts):
        first_B1 = torch.nn.functional.pad(first_B, (0, texts - len(first_B)), value=T)[:, None]
        is_later_BT = torch.arange(T) >= first_B1
        shift_BT = torch.randint(1, max(2, V), (texts, T), generator=generator)
        changed_BT = torch.where(is_later_BT, (text_BT + shift_BT) % V, text_BT)
        changes_BTV = logits_of(model, changed_BT, is_training, seed) - logits_BTV
        change_BT = changes_BTV.abs().amax(-1).masked_fill(is_later_BT, 0)
        if not change_BT.max() <= _LEAK * logits_BTV.abs().max():
            _repeated_logits(model, changed_BT, is_training, seed)  # refuses NaN
            text, token = divmod(int(change_BT.argmax()), T)
            return (
                f"the logits at token {token + 1} change by {float(change_BT.max()):.2g} when the "
                f"later tokens from {int(first_B1[text]) + 1} on change"
            )
    return ""


def _places(T: int, most: int, generator: torch.Generator) -> Tensor:
    """Return the tokens from which on a text is replaced: all but the first, or some of them."""
    places = torch.randperm(T - 1, generator=generator)[:most] + 1
    if most < T - 1:
        parts = 8 if most >= 32 else 1
        edges = (torch.arange(parts + 1) * T // parts)[:, None] + torch.arange(-1, 3)
        places = torch.cat((places, edges.clamp(1, T - 1).flatten()))
    return places.unique()  # type: ignore[no-any-return]


def _repeated_logits(model: LanguageModel, ids_BT: Tensor, is_training: bool, seed: int) -> Tensor:
    """Return logits. Raises OwnCodeError unless computing them again gives the same."""
    logits_BTV = logits_of(model, ids_BT, is_training, seed)
    again_BTV = logits_of(model, ids_BT, is_training, seed)
    if (logits_BTV - again_BTV).abs().max() <= _LEAK * logits_BTV.abs().max():
        return logits_BTV
    what = "computes other numbers for the same ids"
    hint = "draw by torch, random or numpy.random, which are seeded; count in a buffer"
    if not logits_BTV.isfinite().all():
        what = "computes NaN or infinity"
        hint = "look for a row of scores that are all -inf, a division by 0, or a logarithm of 0"
    raise OwnCodeError(
        f"{model.spec.name} {what}{' in training' * is_training}: whether it sees later tokens is "
        "unknown",
        hint,
    )
