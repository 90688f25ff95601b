"""Estimates of the memory of a training run before it starts, within a factor of 2 on a CPU.

One formula counts the numbers that a step keeps. Its constants were fitted to measured peaks
(docs/speed.md). A CUDA GPU is not asked beforehand: the first step shows what fits (step.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.formatting import quantity
from attnlm.compute.device import Device, machine_memory
from attnlm.compute.processes import is_launched, local_count
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.model.loss import LOGITS_AT_ONCE
from attnlm.model.spec import parameter_count
from attnlm.training.step import split_batch
from attnlm.training.validation import windows_at_once

FACTOR = 2.0
"""On a CPU, the estimate and the measured peak differ by less than this factor."""

# The fraction of the memory that a training run may take when it chooses its micro-batch.
_FRACTION = 0.7
_FLOAT = 4  # bytes
# Bytes of libraries, evaluations, prefetched batches and the kernels' own memory.
_PROCESS = {"cpu": 60 * 10**6, "mps": 60 * 10**6, "cuda": 10**9}
# Bytes per id for all else that grows with the vocabulary, such as the tokenizer.
_PER_ID = 1500


class MemoryEstimate(NamedTuple):
    """Bytes that one process takes on the training device, in addition to PyTorch itself."""

    model: int
    """16 for each parameter: the weight, its gradient, and two numbers of the optimizer"""
    batch: int
    """activations and logits, and the gradients of further replicas"""
    process: int

    @property
    def total(self) -> int:
        return sum(self)


def estimate_memory(config: Config, vocab_size: int, device: str) -> MemoryEstimate:
    """Estimate the memory of each process, without building the model."""
    costs = config.spec.costs(vocab_size)
    training = config.training
    threads = (training.threads or torch.get_num_threads()) if device == "cpu" else 1
    split = split_batch(training, threads)
    parameters = parameter_count(config.spec, vocab_size)
    tokens = split.windows * config.spec.block_size
    kept = costs.layers * costs.kept_features
    # One block also has its gradients. Evaluations keep one block, of more tokens at times.
    evaluated = windows_at_once(config.spec, vocab_size, device) * config.spec.block_size
    activations = tokens * kept + 2 * max(tokens, evaluated) * costs.peak_activations
    # Logits have their softmax and gradient. Only some are in memory together, unless the loss is
    # compiled or the user's own, or no LM head computes them. The LM head's gradient is then
    # computed with the loss, in two tensors.
    logits = 3 * tokens * vocab_size
    if costs.width and training.compile != "torch" and training.loss is None:
        logits = min(logits, 2 * LOGITS_AT_ONCE[device])
    lm_head = 2 * vocab_size * costs.lm_head_inputs
    return MemoryEstimate(
        model=4 * _FLOAT * parameters,
        batch=_FLOAT * split.replicas * (activations + logits + lm_head)
        + _FLOAT * (split.replicas - 1) * parameters,
        process=_PROCESS[device] + _PER_ID * vocab_size,
    )


def affordable_micro_batch(config: Config, vocab_size: int, device: Device) -> int | None:
    """Return the largest micro-batch size with which the run fits in memory.

    The run fits if its estimate is at most `_FRACTION` of the available memory. Return None if the
    whole batch fits or the available memory is unknown, and 1 if no size fits.
    """
    available = _available_memory(config.training, device)
    rows = config.training.batch_size // config.training.processes
    for rounds in (n for n in range(1, rows + 1) if rows % n == 0):
        size = rows // rounds if rounds > 1 else None
        candidate = config.with_training(micro_batch_size=size)
        estimate = estimate_memory(candidate, vocab_size, device.name)
        if available is None or estimate.total <= _FRACTION * available:
            break
    return size


def check_memory(config: Config, vocab_size: int, device: Device) -> None:
    """Raise AttnlmError if the run can't fit into the available memory.

    An estimate may be too high by FACTOR, except for what any step needs: that of the model.
    """
    available = _available_memory(config.training, device)
    estimate = estimate_memory(config, vocab_size, device.name)
    if available is None or max(estimate.total / FACTOR, estimate.model) <= available:
        return
    if estimate.batch > estimate.total / 2:
        micro_batch = config.training.micro_batch_size
        rows = micro_batch or config.training.batch_size // config.training.processes
        size = "batch_size" if micro_batch is None else "micro_batch_size"
        hint = f"lower `{size}` or `block_size`" if rows > 1 else "lower `block_size`"
    elif not config.spec.costs(vocab_size).width:
        hint = "prepare the text with a smaller vocabulary, such as tokenizer bpe:1024"
    else:
        hint = "lower `embed_dim`, `heads`, `head_size` or `layers`"
    raise AttnlmError(
        f"this run needs about {quantity(estimate.total, 'B')} of memory, but {device.name} has "
        f"only {quantity(available, 'B')}",
        hint,
    )


def _available_memory(training: TrainingConfig, device: Device) -> int | None:
    """Return the machine's memory divided by its processes. Return None if the system does not
    report it, and for a CUDA GPU."""
    available = machine_memory()
    if available is None or device.name == "cuda":
        return None
    return available // max(1, local_count() if is_launched() else training.processes)
