"""Every model computes what the textbook pass does, whichever way its operations take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attnlm.model import textbook
from attnlm.model.attention import LayerCache
from attnlm.model.language_model import LanguageModel
from attnlm.model.ops import using
from attnlm.model.ops.loss import cross_entropy
from attnlm.model.recorder import Recorder
from tests.models import COMPILED, VARIANTS, gradients, needs_kernels, small_model, some_ids
from tests.tolerances import assert_near, assert_rounded

variants = pytest.mark.parametrize("variant", VARIANTS)


def by_the_book(model: LanguageModel, ids_BT: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    return torch.stack([textbook.forward(model.architecture, weights, row) for row in ids_BT])


def exact_gradients(model: LanguageModel, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return gradients(model, model.loss(inputs, targets))


@variants
def test_logits_and_gradients(variant: str) -> None:
    model = small_model(variant, block_size=257)
    for length in (1, 2, 255, 256, 257):
        inputs, targets = some_ids(2, 2, length)
        logits = by_the_book(model, inputs)
        assert_near(model(inputs), logits, within=1e-12)
        found = gradients(model, model.loss(inputs, targets))
        by_book = gradients(model, cross_entropy(logits, targets))
        assert_near(found, by_book, within=1e-10)


@needs_kernels
@variants
def test_compiled_parts(variant: str) -> None:
    """In float32, of windows that are cut into pieces at odd places."""
    exact = small_model(variant, block_size=33)
    model = copy.deepcopy(exact).float()
    for length in (1, 2, 33):
        inputs, targets = some_ids(2, 3, length)
        with using(COMPILED):
            found = gradients(model, model.loss(inputs, targets))
        assert_rounded(found, exact_gradients, exact, inputs, targets)


@variants
@torch.no_grad()
def test_logits_with_a_cache_and_with_a_recorder(variant: str) -> None:
    model = small_model(variant)
    ids_BT = some_ids(3, 13)
    expected = by_the_book(model, ids_BT)
    caches: list[LayerCache] = []
    parts = [model(part, caches) for part in ids_BT.split([4, 1, 5, 1, 2], dim=1)]
    assert_near(torch.cat(parts, dim=1), expected, within=1e-12)
    assert_near(model(ids_BT, recorder=Recorder()), expected, within=1e-12)


@variants
@torch.no_grad()
def test_float32_stays_close_where_weights_are_large(variant: str) -> None:
    model = small_model(variant)
    for parameter in model.parameters():
        parameter.mul_(3)
    ids_BT = some_ids(3, 13)
    found = copy.deepcopy(model).float()(ids_BT)
    assert_rounded([found], lambda: [by_the_book(model, ids_BT)])
