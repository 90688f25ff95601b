"""Estimates of the memory of a training run before it starts, within a factor of 2.

A short formula sums the bytes of all parameters, of the activations of each layer, and of the
logits that are in memory together. Its constants were fitted to measured peaks (docs/speed.md).
For large vocabularies, the estimates are higher than the measured peaks.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.formatting import byte_size
from attnlm.compute.device import Device, machine_memory
from attnlm.compute.processes import local_count
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.model.costs import Costs
from attnlm.model.ops.loss import LOGITS_AT_ONCE, MOST_COMPILED
from attnlm.training.batch_split import MOST_REPLICAS, split_batch, windows_at_once
from attnlm.training.cuda_graph import can_record_gradients
from attnlm.training.kernel_choice import has_native_ops
from attnlm.training.one_layer import is_one_layer

FACTOR = 2.0
"""The estimate and the measured peak differ by less than this factor."""

# The fraction of the memory that a training run may take when it chooses its micro-batch.
_FRACTION = 0.7
_FLOAT = 4  # bytes
# Copies of a matrix that an update by Muon holds in each thread.
_COPIES_BY_MUON = 5
# Bytes of libraries, prefetched batches and the kernels' own memory.
_PROCESS = {"cpu": 75 * 10**6, "mps": 75 * 10**6, "cuda": 10**9}
# Bytes per id for all else that grows with the vocabulary, such as the tokenizer. This number was
# fitted to the peaks measured with 50,257 ids.
_PER_ID = 1500


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process takes on the training device, in addition to PyTorch itself.

    The total is the sum of all fields, since on a CPU a process mostly keeps freed memory.
    """

    weights: int
    """Weights in float32, and copies of weights: joined into one matrix, transposed or in
    bfloat16."""
    gradients: int
    """One set of gradients for each thread."""
    optimizer: int
    activations: int
    """Activations that a step keeps for the backward pass."""
    logits: int
    """The logits that are in memory at the same time, with their softmax and gradient."""
    evaluation: int
    process: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def estimate_memory(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: str
) -> MemoryEstimate:
    """Estimate the memory of each process, without building the model."""
    costs = config.spec.costs(vocab_size)
    training = config.training
    threads = (training.threads or torch.get_num_threads()) if device == "cpu" else 1
    split = split_batch(training, threads)
    tokens = split.windows * config.spec.block_size
    is_half = training.dtype == "bfloat16" or (training.dtype == "auto" and device == "cuda")
    bytes_per_input = 2 if is_half else _FLOAT
    native = (
        device == "cpu"
        and not is_half
        and training.compile in ("auto", "parts")
        and has_native_ops(config.spec, vocab_size, training.batch_size * config.spec.block_size)
    )
    most_threads = min(threads, MOST_REPLICAS)
    copies = most_threads if device == "cpu" else 0
    optimizer = _optimizer_numbers(training, costs, parameters, copies)
    activations = split.replicas * tokens * _activation_bytes(training, costs, bytes_per_input)
    at_once = 2 * LOGITS_AT_ONCE[device]
    if native:
        at_once = min(MOST_COMPILED * vocab_size, LOGITS_AT_ONCE[device])
    if native and is_one_layer(config.spec, vocab_size, tokens):
        logits = tokens * vocab_size
    else:
        logits = _logits_of_step(training, costs, vocab_size, tokens, device, at_once)
    windows = windows_at_once(config.spec, vocab_size, device)
    together = min(windows * config.spec.block_size, val_tokens)
    evaluation = min(most_threads, -(-val_tokens // together))
    evaluation *= _evaluation_bytes(costs, vocab_size, together, device, at_once)
    if device == "cuda" and not can_record_gradients(config, device):
        # An evaluation reuses the memory of a step, but a recorded step keeps it.
        evaluation = max(0, evaluation - activations - _FLOAT * logits)
    return MemoryEstimate(
        weights=_FLOAT * parameters + bytes_per_input * split.replicas * costs.multiplied_weights,
        gradients=_FLOAT * split.replicas * parameters,
        optimizer=_FLOAT * optimizer,
        activations=activations,
        logits=_FLOAT * split.replicas * logits,
        evaluation=evaluation,
        process=_PROCESS[device] + _PER_ID * vocab_size,
    )


def _optimizer_numbers(training: TrainingConfig, costs: Costs, trained: int, copies: int) -> int:
    """Return the numbers of the optimizer's state, and of `copies` sets of Muon's copies."""
    if training.optimizer != "muon":
        return 2 * trained
    largest = max((rows * columns for rows, columns in costs.matrices.values()), default=0)
    state = 2 * trained - costs.layers * costs.block_matrices
    return state + _COPIES_BY_MUON * copies * largest


def _activation_bytes(training: TrainingConfig, costs: Costs, bytes_per_input: int) -> int:
    """Return the bytes of a token's activations at the peak of a step."""
    block = _FLOAT * costs.kept_features + bytes_per_input * costs.kept_inputs
    kept = costs.layers * block
    if training.recompute:  # one block's activations, and the input of each block
        kept = block + _FLOAT * costs.layers * costs.width
    return kept + bytes_per_input * costs.peak_activations


def _logits_of_step(
    training: TrainingConfig, costs: Costs, vocab_size: int, tokens: int, device: str, at_once: int
) -> int:
    """Return the numbers that the loss of `tokens` tokens needs, `at_once` of them together."""
    is_whole = tokens * vocab_size <= LOGITS_AT_ONCE[device]
    if training.compile == "on" or not costs.width or is_whole:
        return 3 * tokens * vocab_size
    # The gradients of the LM head and of its input are computed with the loss. Three copies of the
    # former fit the peaks measured with 50,257 ids.
    return at_once + (tokens + 3 * vocab_size) * costs.lm_head_inputs


def _evaluation_bytes(costs: Costs, vocab_size: int, tokens: int, device: str, at_once: int) -> int:
    """Return the bytes of a thread that evaluates `tokens` tokens together."""
    logits = tokens * vocab_size
    if costs.width and logits > LOGITS_AT_ONCE[device]:
        logits = at_once
    return _FLOAT * (tokens * costs.peak_activations + 2 * logits)


def affordable_micro_batch(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: Device
) -> int | None:
    """Return the largest micro-batch size with which the run fits in memory.

    The run fits if its estimate is at most `_FRACTION` of the available memory. Return None if the
    whole batch fits or the available memory is unknown, and 1 if no size fits.
    """
    available = _available_memory(device)
    rows = config.training.batch_size // config.training.processes
    for rounds in (n for n in range(1, rows + 1) if rows % n == 0):
        size = rows // rounds if rounds > 1 else None
        candidate = config.with_training(micro_batch_size=size)
        estimate = estimate_memory(candidate, vocab_size, parameters, val_tokens, device.name)
        if available is None or estimate.total <= _FRACTION * available:
            break
    return size


def check_memory(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: Device
) -> None:
    """Raise AttnlmError if the run can't fit into the available memory.

    An estimate may be too high by FACTOR, except for what any step needs: the weights, one set of
    gradients and the optimizer's state.
    """
    available = _available_memory(device)
    estimate = estimate_memory(config, vocab_size, parameters, val_tokens, device.name)
    smallest = config.with_training(threads=1, micro_batch_size=1)
    least = estimate_memory(smallest, vocab_size, parameters, val_tokens, device.name)
    needed = max(estimate.total / FACTOR, least.weights + least.gradients + least.optimizer)
    if available is None or needed <= available:
        return
    of_batch = estimate.activations + estimate.logits
    if of_batch > max(estimate.total - of_batch - estimate.evaluation, estimate.evaluation):
        at_once = config.training.micro_batch_size
        sizes = {None: "`batch_size` or ", 1: ""}.get(at_once, "`micro_batch_size` or ")
        hint = f"lower {sizes}`block_size`"
    elif not config.spec.costs(vocab_size).width:
        hint = "prepare the text with a smaller vocabulary, such as tokenizer bpe:1024"
    else:
        hint = "lower `embed_dim`, `heads`, `head_size` or `layers`"
    raise AttnlmError(
        f"this run needs about {byte_size(estimate.total)} of memory, but {device.name} has only "
        f"{byte_size(available)}",
        hint,
    )


def _available_memory(device: Device) -> int | None:
    """Return the free memory of a CUDA GPU; for other devices, the machine's memory divided by the
    number of local processes, or None if the machine's memory is unknown."""
    if device.name == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    available = machine_memory()
    return None if available is None else available // max(1, local_count())
