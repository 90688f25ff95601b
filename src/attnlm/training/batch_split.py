"""How batches are divided: among micro-batches and replicas in training, into groups of windows in
evaluations."""

from __future__ import annotations

from typing import NamedTuple

from attnlm.config.training import TrainingConfig
from attnlm.model.spec import ModelSpec

MOST_REPLICAS = 8
"""The most replicas of a model in a process. One thread sums the gradients of all replicas."""

_FLOAT = 4  # bytes
# Tokens of an evaluation that are computed together: enough for matmuls at full speed and, on a
# CPU, few enough for its caches. If a token takes more than _BYTES_PER_TOKEN, they are fewer.
_TOKENS_AT_ONCE = {"cpu": 2**11, "mps": 2**13, "cuda": 2**15}
_BYTES_PER_TOKEN = 2**16


class BatchSplit(NamedTuple):
    """The division of a process's rows of a batch."""

    micro_batches: int
    """the number of micro-batches, which are computed one after another"""
    replicas: int
    """the number of replicas, each in a thread, that divide a micro-batch"""
    windows: int
    """the number of windows that a replica computes at once"""


def split_batch(training: TrainingConfig, threads: int) -> BatchSplit:
    """Divide a batch into as few micro-batches as `micro_batch_size` allows, and among replicas.

    If there are fewer replicas than threads, PyTorch uses several threads for each replica.
    """
    rows = training.batch_size // training.processes
    most = training.micro_batch_size or rows
    micro_batches = next(n for n in range(-(-rows // most), rows + 1) if rows % n == 0)
    at_once = rows // micro_batches
    possible = range(min(threads, at_once, MOST_REPLICAS), 0, -1)
    replicas = next(n for n in possible if threads % n == 0 and at_once % n == 0)
    if training.compile == "torch":
        replicas = 1
    return BatchSplit(micro_batches, replicas, at_once // replicas)


def windows_at_once(spec: ModelSpec, vocab_size: int, device: str) -> int:
    """Return how many windows of block_size an evaluation computes together, at least 1."""
    costs = spec.costs(vocab_size)
    numbers = costs.peak_activations if costs.width else 2 * vocab_size
    per_token = max(_BYTES_PER_TOKEN, _FLOAT * numbers)
    return max(1, _TOKENS_AT_ONCE[device] * _BYTES_PER_TOKEN // per_token // spec.block_size)
