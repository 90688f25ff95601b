"""What own code does in a step that a division of its batch would change."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from attnlm.base.own_code import OwnCode
from attnlm.model.language_model import LanguageModel, on_device_of, require_shape
from attnlm.model.layers import dropout_from
from attnlm.training.batch_loss import BatchLoss

_ROUNDING = 1e-5
"""the relative difference of two losses in float32 that rounding may explain"""


def seed_everything(seed: int) -> None:
    """Seed what own code may draw from: the generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def draws_or_changes_buffers(
    model: LanguageModel, loss: BatchLoss, inputs_BT: Tensor, targets_BT: Tensor
) -> bool:
    """Return True if own code in model or loss draws random numbers or changes buffers.

    The replicas' threads would draw from one generator, and change different buffers. Generators of
    the code's own are noticed by another loss of the same batch. Numbers are drawn here.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = _generators()
    losses = []
    model.train()
    for _ in range(2):
        # A generator for each window: dropout draws the same numbers in both passes.
        seeded = [torch.Generator().manual_seed(i) for i in range(len(inputs_BT))]
        with dropout_from(seeded):
            losses.append(loss(model, inputs_BT, targets_BT).item())
    is_found = before != _generators() or losses[0] != losses[1]
    for name, buffer in model.named_buffers():
        is_found |= not buffer.equal(buffers[name])
        buffer.data = buffers[name]
    return is_found


@torch.no_grad()
def needs_whole_batches(
    code: OwnCode, vocab_size: int, inputs_BT: Tensor, targets_BT: Tensor
) -> bool:
    """Return True if an own loss of a batch differs from the mean of its halves beyond rounding.

    A mean over windows does not: threads, micro-batches and processes may divide its batch. The
    logits are drawn, since those of a new model may all be equal.
    """
    half = len(inputs_BT) // 2
    if not half:
        return False
    own = code.check_call({})
    logits_BTV = torch.randn(*inputs_BT.shape, vocab_size, generator=torch.Generator())
    batch = logits_BTV, inputs_BT, targets_BT
    losses = []
    for part in (slice(None), slice(half), slice(half, None)):
        seed_everything(0)
        with on_device_of(inputs_BT):
            loss = own(*(x[part] for x in batch))
        losses.append(require_shape(code, loss, ()).item())
    first, second = (
        int((targets >= 0).sum()) for targets in (targets_BT[:half], targets_BT[half:])
    )
    mean = (losses[1] * first + losses[2] * second) / max(1, first + second)
    return abs(losses[0] - mean) > _ROUNDING * abs(losses[0])


def _generators() -> tuple[object, ...]:
    """Return the states of the generators that own code may draw from."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
