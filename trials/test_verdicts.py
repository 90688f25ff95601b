"""Verdicts on real trainings: ladders of one model under several names claim hardly anything."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

import attnlm
from attnlm.see.verdicts import FALSE_CLAIMS, compare_pairs
from tests.models import prepared
from trials.kit import TEXT, in_child

_SALTED = """
import torch
from torch import nn

class Salted(nn.Sequential):
    def __init__(self, vocab_size, salt=0):
        torch.rand(salt)  # so that the weights after it are others
        super().__init__(nn.Embedding(vocab_size, 8), nn.Tanh(), nn.Linear(8, vocab_size))
"""
_SALTS = 8
_LADDERS, _SEEDS = 1000, 40


@pytest.mark.timeout(3600)
def test_ladders_of_one_model_with_other_weights_claim_nothing(
    place: Path, generator: Random, pytestconfig: pytest.Config
) -> None:
    """With fewer cases, fewer seeds are trained, and the share of false claims varies more."""
    count = min(_LADDERS, pytestconfig.option.cases)
    seeds = max(6, _SEEDS * count // _LADDERS)
    losses = in_child(_train, place, seeds, generator.randrange(2**20))
    assert len(np.unique(losses)) == _SALTS * seeds
    wrong = 0
    for _ in range(count):
        salts = generator.sample(range(_SALTS), generator.randint(2, 6))
        drawn = generator.sample(range(seeds), generator.randint(2, 5))
        groups = {f"{salt}": {seed: losses[salt][seed] for seed in drawn} for salt in salts}
        baseline = generator.choice([None, f"{salts[0]}"])
        pairs = compare_pairs(groups, baseline)
        wrong += any(pair.verdict in ("better", "worse") for pair in pairs)
    print(f"{wrong} of {count} ladders claim a difference")
    chance = 3 * math.sqrt(FALSE_CLAIMS * (1 - FALSE_CLAIMS) / count)
    assert wrong / count <= FALSE_CLAIMS + (0.015 if count == _LADDERS else chance)


def _train(place: Path, seeds: int, first: int) -> list[list[float]]:
    """Return the losses of each salt, by seed."""
    (place / "salted.py").write_text(_SALTED)
    found = attnlm.ladder(
        prepared(place, TEXT),
        rungs=[f"{place}/salted.py:Salted:salt={salt}" for salt in range(_SALTS)],
        steps=20,
        eval_every=20,
        seeds=seeds,
        seed=first,
        tokens=0,
        threads=1,
        checkpoint_dir=place / "checkpoints",
    )
    return [[*group.values] for group in found.groups]
