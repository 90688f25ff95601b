"""How much memory a training run takes, told before it takes it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch

from attnlm.base.errors import AttnlmError
from attnlm.base.readable import byte_size
from attnlm.compute.device import Device, machine_memory
from attnlm.compute.processes import local_count
from attnlm.config.settings import Config
from attnlm.model.architecture import Architecture
from attnlm.model.low_rank import LoRA, adapter_numbers
from attnlm.model.ops.loss import LOGITS_AT_ONCE, MOST_COMPILED
from attnlm.model.sizes import block_matrices, block_shapes
from attnlm.training.activations import (
    joined_matrices,
    kept_by_block,
    kept_outside,
    one_layer_numbers,
    widest_backward,
    widest_forward,
)
from attnlm.training.kernels import has_parts
from attnlm.training.one_layer import is_one_layer
from attnlm.training.share import MOST_SHARES, Cut, cut_batch

FACTOR = 2.0
"""By how much what is measured may differ from the estimate, either way."""

# Of the memory there is, what a training takes by itself: the estimate may be too low.
_SHARE = 0.7

_FLOAT = 4  # bytes
# Whatever the run: the package and its libraries, the batches drawn ahead, kernels' own memory.
_PROCESS = {"cpu": 75 * 10**6, "mps": 75 * 10**6, "cuda": 10**9}
# What pieces of memory take that have been freed and not been taken again: measured.
_FRAGMENTS = {"cpu": 1.15, "mps": 1.0, "cuda": 1.0}
# Of a sharded model: training goes on while a copy is serialised and written.
_SHARDED_COPIES = 2
# Copies of a matrix that an update by Muon holds, in each thread.
_UPDATED = 5
# Blocks whose weights are gathered: the one that computes, and the next one. Embeddings and head
# are gathered all the time.
_GATHERED = 2

# Of an evaluation: enough tokens for products to run at full speed; on a CPU, few enough to stay in
# its caches.
_TOKENS_AT_ONCE = {"cpu": 2**11, "mps": 2**13, "cuda": 2**15}
# Only where a token takes more than this are there fewer of them: at most 128 MB a CPU's thread.
_BYTES_PER_TOKEN = 2**16


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process on the device that trains, in addition to PyTorch itself.

    They add up: what is freed on a CPU mostly stays with the process.
    """

    weights: int
    """In float32, and copies of them: joined, gathered, turned, in lower precision."""
    gradients: int
    """A set for each thread."""
    optimizer: int
    activations: int
    """What a step keeps for the way back, and what that takes at its widest place."""
    logits: int
    """Those that are held at once, their softmax and its gradient."""
    evaluation: int
    """What an evaluation computes from the windows that it takes at once."""
    checkpoint: int
    """On its way to the disk."""
    process: int
    """Libraries, batches, kernels."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class _Step:
    """What decides how much a step holds at once: bytes of a product's number, and which forms."""

    width: int
    compiled: bool
    whole: bool
    """torch.compile holds all logits at once."""
    one_layer: bool
    sharded: bool
    recompute: bool
    lora: LoRA | None


def estimate_memory(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: str
) -> MemoryEstimate:
    """From the sizes alone, of each process."""
    a, training, lora = config.model, config.training, config.training.adapters
    threads = (training.threads or torch.get_num_threads()) if device == "cpu" else 1
    cut = cut_batch(training, threads)
    form = _form(config, vocab_size, cut, device)
    shards = training.processes if training.is_sharded else 1

    own = _FLOAT * parameters // shards
    trained = own if lora is None else _FLOAT * adapter_numbers(a, lora)
    frozen = 0 if lora is None else own
    blocks = a.layers * block_matrices(a)
    gathered = parameters - blocks + min(_GATHERED, a.layers) * block_matrices(a)
    gathered *= form.sharded
    by_muon = _FLOAT * blocks // shards if training.optimizer == "muon" else 0
    optimizer = 2 * trained - by_muon
    if by_muon and device == "cpu":
        optimizer += _FLOAT * _UPDATED * min(threads, MOST_SHARES) * _largest(a)

    tokens = cut.windows * a.block_size
    activations = int(cut.shares * tokens * _bytes_per_token(a, form) * _FRAGMENTS[device])
    logits = cut.shares * _FLOAT * _logits(a, vocab_size, tokens, device, form)
    evaluation = _evaluation(a, vocab_size, val_tokens, device, form, threads)
    if device == "cuda":  # its memory is used again
        evaluation = max(0, evaluation - activations - logits)
    return MemoryEstimate(
        weights=frozen
        + trained
        + form.width * (gathered + cut.shares * _copied(a, vocab_size, form))
        + _FLOAT * cut.shares * _turned(a, vocab_size, form),
        gradients=cut.shares * trained + _FLOAT * gathered,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        evaluation=evaluation,
        checkpoint=_checkpoint(trained, optimizer, parameters) if form.sharded else 0,
        process=_PROCESS[device],
    )


def _checkpoint(weights: int, optimizer: int, parameters: int) -> int:
    """Bytes of copies; the main process gathers all of a sharded model, to sample from it."""
    return _SHARDED_COPIES * (weights + optimizer) + _FLOAT * parameters


def _form(config: Config, vocab_size: int, cut: Cut, device: str) -> _Step:
    a, training = config.model, config.training
    sizes = a, vocab_size, training.batch_size * a.block_size
    half = training.dtype == "bfloat16" or (training.dtype == "auto" and device == "cuda")
    on_cpu = device == "cpu" and not half
    return _Step(
        width=2 if half else _FLOAT,
        compiled=on_cpu and training.compile in ("auto", "parts") and has_parts(*sizes),
        whole=training.compile == "on",
        one_layer=on_cpu
        and not training.is_sharded
        and training.lora is None
        and training.compile != "on"
        and is_one_layer(a, vocab_size, cut.windows * a.block_size),
        sharded=training.is_sharded,
        recompute=training.recompute,
        lora=training.adapters,
    )


def _bytes_per_token(a: Architecture, form: _Step) -> int:
    """Of a step's activations."""
    if a.embed_dim is None:
        return 0
    if form.one_layer:
        return _FLOAT * one_layer_numbers(a, compiled=form.compiled)
    block = kept_by_block(a, compiled=form.compiled, lora=form.lora).bytes(form.width)
    blocks = a.layers * block
    if form.recompute:
        blocks = block + a.layers * _FLOAT * a.embed_dim
    outside = kept_outside(a, compiled=form.compiled).bytes(form.width)
    return blocks + outside + form.width * widest_backward(a)


def _copied(a: Architecture, vocab_size: int, form: _Step) -> int:
    """Numbers in the copies of weights that a step holds."""
    if form.one_layer:
        return 0
    if form.width < _FLOAT and not form.sharded:
        return a.layers * block_matrices(a) + vocab_size * a.body_dim
    if form.sharded or form.lora is not None:  # what is frozen lies joined already
        return 0
    return (1 if form.recompute else a.layers) * joined_matrices(a)


def _turned(a: Architecture, vocab_size: int, form: _Step) -> int:
    """Numbers in the largest matrix: a product copies it to the order in which it is fastest."""
    if not form.compiled or form.one_layer:
        return 0
    return max(_largest(a), joined_matrices(a), vocab_size * a.body_dim)


def _largest(a: Architecture) -> int:
    """Numbers in the largest matrix of a block."""
    return max((rows * columns for rows, columns in block_shapes(a)), default=0)


def _logits(a: Architecture, vocab_size: int, tokens: int, device: str, form: _Step) -> int:
    """Numbers in the logits that a thread holds at once, their softmax and its gradient."""
    logits = tokens * vocab_size
    if form.one_layer:
        return logits
    if a.embed_dim is None or form.whole or logits <= LOGITS_AT_ONCE[device]:
        return 3 * logits
    # The gradients of what the head reads, and of its weights, are made on the way forward.
    # Two more copies of the latter fit the peaks measured with 50,257 ids; their cause is unknown.
    rows = tokens + (3 * vocab_size if form.lora is None else 0)
    return _logits_at_once(vocab_size, device, form) + rows * a.body_dim


def _logits_at_once(vocab_size: int, device: str, form: _Step) -> int:
    if form.compiled:
        return min(MOST_COMPILED * vocab_size, LOGITS_AT_ONCE[device])
    return 2 * LOGITS_AT_ONCE[device]


def _evaluation(
    a: Architecture, vocab_size: int, val_tokens: int, device: str, form: _Step, threads: int
) -> int:
    """Bytes of what an evaluation computes at once."""
    tokens = min(windows_at_once(a, vocab_size, device) * a.block_size, val_tokens)
    logits = tokens * vocab_size
    if is_one_layer(a, vocab_size, tokens) and form.one_layer:
        by_token = one_layer_numbers(a, compiled=form.compiled, forward=True)
        numbers = tokens * by_token + logits
    else:
        if a.embed_dim is not None and logits > LOGITS_AT_ONCE[device]:
            logits = _logits_at_once(vocab_size, device, form)
        numbers = tokens * widest_forward(a) + 2 * logits
    return _FLOAT * numbers * min(threads, -(-val_tokens // tokens), MOST_SHARES)


def windows_at_once(a: Architecture, vocab_size: int, device: str) -> int:
    """How many windows of block_size an evaluation computes together, at least 1."""
    numbers = widest_forward(a) + (2 * vocab_size if a.embed_dim is None else 0)
    per_token = max(_BYTES_PER_TOKEN, _FLOAT * numbers)
    return max(1, _TOKENS_AT_ONCE[device] * _BYTES_PER_TOKEN // per_token // a.block_size)


def affordable_micro_batch(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: Device
) -> int | None:
    """The most windows at once that leave some memory to others, or one; None where all do."""
    there = _memory_of(device)
    rows = config.training.batch_size // config.training.processes
    for rounds in (n for n in range(1, rows + 1) if rows % n == 0):
        size = rows // rounds if rounds > 1 else None
        training = replace(config.training, micro_batch_size=size)
        some = replace(config, training=training)
        estimate = estimate_memory(some, vocab_size, parameters, val_tokens, device.name)
        if there is None or estimate.total <= _SHARE * there:
            return size
    return 1 if rows > 1 else None


def check_memory(
    config: Config, vocab_size: int, parameters: int, val_tokens: int, device: Device
) -> None:
    """Raises AttnlmError where the run clearly can't fit: by more than the estimate may be off."""
    estimate = estimate_memory(config, vocab_size, parameters, val_tokens, device.name)
    there = _memory_of(device)
    if there is None or estimate.total <= FACTOR * there:
        return
    of_batch = estimate.activations + estimate.logits
    if of_batch > max(estimate.total - of_batch - estimate.evaluation, estimate.evaluation):
        at_once = config.training.micro_batch_size
        sizes = {None: "`batch_size` or ", 1: ""}.get(at_once, "`micro_batch_size` or ")
        hint = f"lower {sizes}`block_size`"
    elif config.model.embed_dim is None:
        hint = "prepare the text with a smaller vocabulary, such as tokenizer bpe:1024"
    else:
        hint = "lower `embed_dim`, `heads`, `head_size` or `layers`"
    raise AttnlmError(
        f"this run needs about {byte_size(estimate.total)} of memory, and {device.name} has only "
        f"{byte_size(there)}",
        hint,
    )


def _memory_of(device: Device) -> int | None:
    """Bytes that a GPU has free, or a process' share of the machine's, where it tells."""
    if device.name == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    there = machine_memory()
    return None if there is None else there // max(1, local_count())
