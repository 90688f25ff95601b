"""Batches are a function of seed and step, by the names that `import attnlm` offers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnlm import AttnlmError, Batches, UsageError


def numbered(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return a text whose tokens are their own positions, so that a window shows its start."""
    return np.arange(length, dtype=np.uint16)


def test_targets_are_the_inputs_one_token_later() -> None:
    batches = Batches(numbered(1000), block_size=7, batch_size=5, stride=7, seed=3)
    inputs, targets = batches(11)
    assert inputs.shape == targets.shape == (5, 7)
    assert inputs.dtype == np.int64
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(7))


@pytest.mark.parametrize("stride", [1, 5, 7, 11])
def test_an_epoch_is_a_shuffled_pass_over_evenly_spaced_windows(stride: int) -> None:
    length, block_size = 211, 7
    batches = Batches(numbered(length), block_size=block_size, batch_size=1, stride=stride, seed=3)
    windows = (length - block_size - stride) // stride + 1
    orders, phases = set(), set()
    every = batches.starts(np.arange(6 * windows, dtype=np.uint64))
    for starts in every.reshape(6, windows).tolist():
        assert set(np.diff(sorted(starts))) == {stride}
        assert min(starts) < stride
        assert max(starts) + block_size + 1 <= length
        assert starts != sorted(starts)
        orders.add(tuple(start - min(starts) for start in starts))
        phases.add(min(starts))
    assert len(orders) == 6
    assert stride == 1 or len(phases) > 1


def test_random_windows_are_uniform_and_reach_both_ends() -> None:
    batches = Batches(numbered(30), block_size=10, batch_size=100, stride=None, seed=1)
    starts = batches.starts(np.arange(200 * 100, dtype=np.uint64))
    counts = np.bincount(starts, minlength=20)
    assert len(counts) == 20  # the last start leaves room for the last target
    assert counts.min() > 850 and counts.max() < 1150  # 1000 ± 5 standard deviations


def test_a_step_depends_on_seed_and_step_alone() -> None:
    def make(seed: int) -> Batches:
        return Batches(numbered(5000), block_size=8, batch_size=4, stride=8, seed=seed)

    one, other = make(5), make(5)
    forwards = [one(step)[0] for step in range(300)]
    for step in reversed(range(300)):
        assert np.array_equal(other(step)[0], forwards[step])
    assert not np.array_equal(make(6)(0)[0], forwards[0])
    assert make(2**63 - 1)(10**12)[0].shape == (4, 8)  # nothing overflows


def test_the_smallest_text_has_one_window_and_a_shorter_one_is_refused() -> None:
    for stride in (None, 1, 4, 100):
        batches = Batches(numbered(5), block_size=4, batch_size=3, stride=stride, seed=0)
        assert np.array_equal(batches(2)[1], [[1, 2, 3, 4]] * 3)
    with pytest.raises(AttnlmError, match="has 5 tokens, but `block_size` 5 needs at least 6"):
        Batches(numbered(5), block_size=5, batch_size=3, stride=5, seed=0)


def test_the_order_of_an_epoch_depends_on_the_seed_not_only_its_phase() -> None:
    """Windows one token apart begin where they begin with any seed: only their order is left."""
    one, other = (
        Batches(numbered(100), block_size=4, batch_size=50, stride=1, seed=seed) for seed in (1, 2)
    )
    assert one(0)[0][:, 0].tolist() != other(0)[0][:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("block_size", 0), ("batch_size", 0), ("batch_size", 2.5), ("seed", None), ("stride", 0)],
)
def test_arguments_that_make_no_batches_are_refused(name: str, wrong: Any) -> None:
    arguments: dict[str, Any] = {"block_size": 4, "batch_size": 2, "seed": 1, name: wrong}
    with pytest.raises(UsageError, match=f"`{name}`"):
        Batches(numbered(99), **arguments)
