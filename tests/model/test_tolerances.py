"""The tolerances of other tests let rounding pass, and nothing that is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attnlm.model.language_model import LanguageModel
from tests import tolerances
from tests.models import gradients, small_model, some_ids
from tests.tolerances import assert_near, assert_rounded, rounding_errors

AT_0 = "transformer:norm=none:norm_epsilon=0.03:rotary_base=7"
"""At T = 1 its gradients of queries and keys are 0; noise of 9e-5 was seen there."""
SOME = ("bigram", "average", "multi-head", "gpt2", "qwen3:kv_heads=1:mlp_width=5", AT_0)
"""The tolerances are tested here, not the models."""


def batch(length: int) -> tuple[Tensor, Tensor]:
    inputs, targets = some_ids(2, 3, length)
    return inputs, targets


def exact_gradients(model: LanguageModel, length: int) -> dict[str, Tensor]:
    return gradients(model, model.loss(*batch(length)))


@pytest.mark.parametrize("length", [1, 13])
@pytest.mark.parametrize("variant", SOME)
def test_one_percent_of_any_gradient_is_noticed(variant: str, length: int) -> None:
    model = small_model(variant)
    exact = exact_gradients(model, length)
    norms = {name: gradient.norm().item() for name, gradient in exact.items()}
    all_are = sum(norm**2 for norm in norms.values()) ** 0.5
    wrong = {name: 1.01 * gradient for name, gradient in exact.items()}
    errors = rounding_errors(wrong, exact_gradients, model, length)
    for name, norm in norms.items():
        if norm < 1e-12 * all_are:  # 0, but for the rounding of float64
            continue
        assert errors[name] > 10 * tolerances._MARGIN, name
        if norm > 2e-4 * all_are:
            with pytest.raises(AssertionError, match=name):
                assert_near({**exact, name: wrong[name]}, exact)


def test_rounding_of_terms_that_cancel_is_tolerated() -> None:
    model = small_model(AT_0, block_size=33)
    exact = exact_gradients(model, 1)
    name = "blocks.0.attention.query.weight"
    assert exact[name].norm() < 1e-9
    noise = torch.zeros_like(exact[name])
    noise[0, 0] = 9e-5
    assert_rounded({**exact, name: noise}, exact_gradients, model, 1)
    assert_near({**exact, name: noise}, exact)
    for wrong in (0.1, torch.inf, torch.nan):
        noise[0, 0] = wrong
        with pytest.raises(AssertionError, match=name):
            assert_rounded({**exact, name: noise}, exact_gradients, model, 1)
        with pytest.raises(AssertionError, match=name):
            assert_near({**exact, name: noise}, exact)


@pytest.mark.parametrize("variant", SOME)
def test_gradients_in_float32_are_within_the_tolerances(variant: str) -> None:
    model = small_model(variant)
    rounded = copy.deepcopy(model).float()
    for length in (1, 2, 13):
        found = gradients(rounded, rounded.loss(*batch(length)))
        assert_rounded(found, exact_gradients, model, length)
        assert_near(found, exact_gradients(model, length), within=1e-4)
