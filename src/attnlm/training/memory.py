"""How much memory a training run takes, told before it takes it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.readable import byte_size
from attnlm.compute.device import Device
from attnlm.compute.processes import local_count
from attnlm.config.settings import Config
from attnlm.model.architecture import Architecture
from attnlm.model.ops.loss import LOGITS_AT_ONCE
from attnlm.training.one_layer import LONGEST_CONTEXT
from attnlm.training.share import MOST_SHARES, cut_batch

FACTOR = 2.0
"""By how much what is measured may differ from the estimate, either way."""

# Of the memory there is, what a training takes by itself: the estimate may be too low.
_SHARE = 0.7

_FLOAT = 4
# Weights, gradient and two moments stay; a checkpoint is built in memory before it is written.
_FLOATS_PER_PARAMETER = 4 + 4
# Whatever the run: the batches drawn ahead, the validation split's ids, kernels' own memory.
_ALWAYS = 2**25

# Of an evaluation: enough tokens for products to run at full speed; on a CPU, few enough to stay in
# its caches.
_TOKENS_AT_ONCE = {"cpu": 2**11, "mps": 2**13, "cuda": 2**15}
# Only where a token takes more than this are there fewer of them: at most 128 MB a CPU's thread.
_BYTES_PER_TOKEN = 2**16


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device that trains, in addition to PyTorch itself."""

    parameters: int
    """Weights, gradients, the optimizer's state, and the checkpoint on its way to the disk."""
    activations: int
    """What a step computes from its batch."""
    evaluation: int
    """What an evaluation computes from the windows that it takes at once."""

    @property
    def total(self) -> int:
        return self.parameters + self.activations + self.evaluation + _ALWAYS


def estimate_memory(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: str
) -> MemoryEstimate:
    """From the sizes alone, for a run in float32; lower precision takes less."""
    model, training = config.model, config.training
    threads = (training.threads or torch.get_num_threads()) if device == "cpu" else 1
    cut = cut_batch(training, threads)
    count, tokens = cut.shares, cut.at_once * model.block_size
    kept = tokens * _floats_per_token(model)
    at_once = min(windows_at_once(model, vocab_size, device) * model.block_size, val_tokens)
    # Nothing is kept for a way back: only one layer, and no dropout, takes memory.
    one_layer = replace(model, layers=1, dropout=0.0)
    evaluated = at_once * _floats_per_token(one_layer)
    evaluated += _logits(model, vocab_size, at_once, device)
    return MemoryEstimate(
        parameters=_FLOAT * (_FLOATS_PER_PARAMETER + count - 1) * parameters,
        activations=_FLOAT * (kept + count * _logits(model, vocab_size, tokens // count, device)),
        evaluation=_FLOAT * evaluated * min(threads, -(-val_tokens // at_once), MOST_SHARES),
    )


def _logits(a: Architecture, vocab_size: int, tokens: int, device: str) -> int:
    """Numbers in the logits that are held at once, their softmax and its gradient."""
    logits = tokens * vocab_size
    return 3 * (logits if a.embed_dim is None else min(logits, LOGITS_AT_ONCE[device]))


def windows_at_once(a: Architecture, vocab_size: int, device: str) -> int:
    """How many windows of block_size an evaluation computes together, at least 1."""
    numbers = _floats_per_token(replace(a, layers=1, dropout=0.0))
    numbers += 2 * vocab_size if a.embed_dim is None else 0
    per_token = max(_BYTES_PER_TOKEN, _FLOAT * numbers)
    return max(1, _TOKENS_AT_ONCE[device] * _BYTES_PER_TOKEN // per_token // a.block_size)


def _floats_per_token(a: Architecture) -> int:
    """Of the body's activations, kept for the way back or alive at its widest place."""
    if a.embed_dim is None:
        return 0
    width, length = a.embed_dim, a.block_size
    heads = a.heads * a.head_dim
    # Without dropout on the weights attention takes kernels, or a form, that keep no scores.
    has_dropout = bool(a.dropout) and not a.residual
    scores = 4 * a.maps_per_layer * length if has_dropout else 0
    if a.layers == 1 and length <= LONGEST_CONTEXT:
        scores = max(scores, 2 * a.maps_per_layer * length)
    # Queries, keys and values before and after rotation, and copied where there are several heads;
    # what an MLP multiplies.
    mixed = (10 if a.heads > 1 else 7) * heads if a.attention == "softmax" else 2 * width
    norms = 4 * width if a.norm != "none" else 0
    mlp = {"none": 0, "swiglu": 5, "gelu": 3, "relu2": 4}[a.mlp] * a.mlp_dim
    per_block = 2 * width + mixed + scores + norms + mlp
    return 4 * width + a.layers * per_block


def affordable_micro_batch(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: Device
) -> int | None:
    """The most windows at once that leave some memory to others; None where all do, or none."""
    there = _memory_of(device)
    rows = config.training.batch_size // config.training.processes
    for rounds in (n for n in range(1, rows + 1) if rows % n == 0):
        size = rows // rounds if rounds > 1 else None
        training = replace(config.training, micro_batch_size=size)
        some = replace(config, training=training)
        estimate = estimate_memory(some, vocab_size, parameters, val_tokens, device.name)
        if there is None or estimate.total <= _SHARE * there:
            return size
    return None


def check_memory(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: Device
) -> None:
    """Raises AttnlmError where the run clearly can't fit: by more than the estimate may be off."""
    estimate = estimate_memory(config, vocab_size, parameters, val_tokens, device.name)
    there = _memory_of(device)
    if there is None or estimate.total <= FACTOR * there:
        return
    if estimate.activations > max(estimate.parameters, estimate.evaluation):
        size = "batch_size" if config.training.micro_batch_size is None else "micro_batch_size"
        hint = f"lower `{size}` or `block_size`"
    elif config.model.embed_dim is None:
        hint = "prepare the text with a smaller vocabulary, such as tokenizer bpe:1024"
    else:
        hint = "lower `embed_dim`, `heads`, `head_size` or `layers`"
    raise AttnlmError(
        f"this run takes about {byte_size(estimate.total)} of memory, and {device.name} has "
        f"{byte_size(there)}",
        hint,
    )


def _memory_of(device: Device) -> int | None:
    """Bytes that a GPU has free, or a process' share of the machine's, where it tells."""
    if device.name == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return there // max(1, local_count())
    except (AttributeError, ValueError, OSError):
        return None
