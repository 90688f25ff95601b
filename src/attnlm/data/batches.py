"""The windows of the text that a step trains on, as a pure function of (seed, step).

No random generator keeps a state, so a resumed run, or a run that divides batches among processes,
sees the same data as an uninterrupted run of one process.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.setting_fields import check_value
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset, Ids, ids_at
from attnlm.data.examples import Examples
from attnlm.model.architecture import Architecture

# The windows of several steps are read in one call, which reduces NumPy's overhead per step.
_MOST_STEPS_AT_ONCE = 128
_TOKENS_AT_ONCE = 2**16


class Batches:
    """Batches of a split as a function of the step: the same arguments give the same batches.

        dataset = attnlm.open_dataset("tales-char")
        batches = attnlm.Batches(dataset.train, block_size=64, batch_size=12, seed=1)
        inputs, targets = batches(0)  # of step 0

    `inputs` are windows of `tokens`, `targets` the same windows one token later: both are of int64
    and of shape (batch_size, block_size), and contiguous in memory. No call depends on an earlier
    call, so steps can be computed in any order.

    If `stride` is None, windows start at uniformly random places. Otherwise, an epoch is a pass
    over windows that start `stride` tokens apart. Each epoch has a new random order, and its
    leftmost window starts at a new random place below `stride`. By default, `train` sets `stride`
    to `block_size`. If several processes divide each batch among them, `rows` is the slice of the
    batch that a call in this process returns.

    The arrays are views of a cache: copy them before you write to them. `train` differs from your
    loop in optimizer, schedule, initialisation and evaluation, so compare the losses of your loop
    only with a baseline in the same loop.

    If `examples` are given (`dataset.train_examples`), each window begins with an example and has
    as many whole examples as fit; the target is -100 behind the last of them and, if `only_answers`
    is true, for tokens of questions. PyTorch's cross-entropy ignores this target. Windows then
    start at a random example, or follow each other in an epoch by the number of examples that a
    window has on average.

    Raises UsageError for invalid arguments, and AttnlmError if `tokens` is too short for one
    window. A call raises AttnlmError if the data set's file has changed since it was opened, or an
    id is too large for `vocab_size`.
    """

    def __init__(
        self,
        tokens: Ids,
        *,
        block_size: int,
        batch_size: int,
        seed: int,
        stride: int | None = None,
        vocab_size: int = 2**32,
        rows: slice = slice(None),
        examples: Examples | None = None,
        only_answers: bool = False,
    ) -> None:
        check_value(Architecture, "block_size", block_size)
        check_value(TrainingConfig, "batch_size", batch_size)
        check_value(TrainingConfig, "seed", seed)
        if stride is not None:
            check_value(TrainingConfig, "stride", stride)
        if examples is None:
            check_length(len(tokens), block_size, "training")
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.stride = stride
        self.seed = seed
        self.vocab_size = vocab_size
        self._rows = np.arange(batch_size)[rows]
        self._possible = len(tokens) - block_size
        self._examples = examples
        self._only_answers = only_answers
        if examples is not None:
            if len(examples.is_answer) != len(tokens):
                raise UsageError(
                    f"`examples` are places in {len(examples.is_answer):,} tokens, and there are "
                    f"{len(tokens):,}",
                    "take ids and examples from the same split",
                )
            self._possible = len(examples)
            self.stride = None if stride is None else examples.per_window(block_size)
        at_once = _TOKENS_AT_ONCE // (len(self._rows) * block_size)
        self._steps_at_once = max(1, min(_MOST_STEPS_AT_ONCE, at_once))
        self._block = functools.lru_cache(maxsize=2)(self._read_block)

    def __call__(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of a step, each of int64 and shape (rows, block_size)."""
        block, place = divmod(step, self._steps_at_once)
        rows = slice(place * len(self._rows), (place + 1) * len(self._rows))
        inputs, targets = self._block(block)
        return inputs[rows], targets[rows]

    def _read_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of all steps of a block."""
        steps = np.arange(block * self._steps_at_once, (block + 1) * self._steps_at_once)
        numbers = steps[:, None] * self.batch_size + self._rows
        starts = self.starts(numbers.ravel().astype(np.uint64))
        if self._examples is not None:
            return self._examples.windows(self._ids_at, starts, self.block_size, self._only_answers)
        windows = self._ids_at(starts[:, None] + np.arange(self.block_size + 1))
        return windows[:, :-1].astype(np.int64, "C"), windows[:, 1:].astype(np.int64, "C")

    def _ids_at(self, places: NDArray[np.int64]) -> NDArray[Any]:
        return ids_at(self.tokens, places, self.vocab_size, "train.bin")

    def starts(self, windows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the offset at which each window starts, given the numbers of the windows.

        If there are examples, the offset counts examples, not tokens.
        The first window of step s has the number s · batch_size.
        """
        if self.stride is None:
            return (_random_bits(self.seed, windows) % np.uint64(self._possible)).astype(np.int64)
        phases = min(self.stride, self._possible)
        per_epoch = (self._possible - phases) // self.stride + 1
        if self._examples is not None:  # the first example follows the last
            phases = self._possible
            per_epoch = -(-self._possible // self.stride)
        epoch, place = np.divmod(windows, np.uint64(per_epoch))
        phase = _random_bits(self.seed, epoch) % np.uint64(phases)
        order = _shuffled_place(self.seed, epoch, place, per_epoch)
        places = phase + order * np.uint64(self.stride)
        return (places % np.uint64(self._possible)).astype(np.int64)


def check_length(
    length: int, block_size: int, split: str, hint: str = "prepare a longer text"
) -> None:
    """Raise AttnlmError for a split too short for one window and its targets."""
    if length < block_size + 1:
        raise AttnlmError(
            f"the {split} split has {length} tokens, but `block_size` {block_size} needs at least "
            f"{block_size + 1}",
            hint,
        )


def check_splits(dataset: Dataset, block_size: int, *, is_fixed: bool = False) -> None:
    """Raise AttnlmError if a split of a text is too short for one window and its targets.

    Set `is_fixed` if the context can't be changed.
    """
    largest = dataset.largest_block_size
    if block_size > largest:
        split = "training" if dataset.train_tokens < dataset.val_tokens else "validation"
        hint = "prepare a longer text"
        if split == "validation" and dataset.val_fraction:
            hint += ", or with a larger `val_fraction`"
        if largest > 0 and not is_fixed:
            hint = f"use `block_size` {largest} or less, or {hint}"
        check_length(largest + 1, block_size, split, hint)


def window_seeds(seed: int, step: int, first: int, count: int) -> list[int]:
    """Return the dropout seeds of `count` windows of a step, beginning with window `first`."""
    windows = np.arange(first, first + count, dtype=np.uint64)
    hashed = _random_bits(seed, (np.uint64(step) << np.uint64(24)) + windows)
    return [int(h) for h in hashed >> np.uint64(1)]


def _shuffled_place(
    seed: int, epoch: NDArray[np.uint64], place: NDArray[np.uint64], count: int
) -> NDArray[np.uint64]:
    """Return, for each pair of `epoch` and `place`, the number at this place of the epoch's order.

    The order of an epoch is a random permutation of the numbers below `count`. A Feistel network
    permutes the numbers below the next power of four. A result that is not below `count` is
    permuted again until it is ("cycle walking": Black and Rogaway, 2002).
    """
    half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half_bits) - np.uint64(1)

    def permute(value: NDArray[np.uint64], epoch: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left = value >> half_bits
        right = value & low
        for turn in range(1, 5):
            key = _random_bits(seed + turn, epoch)
            left, right = right, left ^ (_mix_bits(right ^ key) & low)
        return left << half_bits | right

    result = permute(place, epoch)
    while (outside := result >= np.uint64(count)).any():
        result[outside] = permute(result[outside], epoch[outside])
    return result


def _random_bits(seed: int, counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each (seed, counter)."""
    return _mix_bits(
        _mix_bits(counter + _GOLDEN) ^ _mix_bits(np.array([seed], np.uint64) + _GOLDEN)
    )


def _mix_bits(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), which mixes all bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
