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
models = pytest.mark.parametrize("variant", ["average", "gpt2", AT_0])


def of_length(model: LanguageModel, length: int) -> dict[str, Tensor]:
    inputs, targets = some_ids(2, 3, length)
    return gradients(model, model.loss(inputs, targets))


@models
def test_gradients_in_float32_are_within_the_tolerances(variant: str) -> None:
    model = small_model(variant)
    rounded = copy.deepcopy(model).float()
    for length in (1, 2, 13):
        found = of_length(rounded, length)
        assert_rounded(found, of_length, model, length)
        assert_near(found, of_length(model, length), within=1e-4)


@models
def test_one_percent_of_any_gradient_is_noticed(variant: str) -> None:
    model = small_model(variant)
    for length in (1, 13):
        exact = of_length(model, length)
        norms = {name: gradient.norm().item() for name, gradient in exact.items()}
        of_all = sum(norm**2 for norm in norms.values()) ** 0.5
        wrong = {name: 1.01 * gradient for name, gradient in exact.items()}
        errors = rounding_errors(wrong, of_length, model, length)
        for name, norm in norms.items():
            if norm > 1e-12 * of_all:  # smaller ones are 0, but for the rounding of float64
                assert errors[name] > 10 * tolerances._MARGIN, name
            if norm > 2e-4 * of_all:
                with pytest.raises(AssertionError, match=name):
                    assert_near({**exact, name: wrong[name]}, exact)


@pytest.mark.parametrize("error", [0.1, torch.inf, torch.nan])
def test_rounding_of_terms_that_cancel_is_tolerated_and_no_other_error(error: float) -> None:
    model = small_model(AT_0, block_size=33)
    exact = of_length(model, 1)
    name = "blocks.0.attention.query.weight"
    assert exact[name].norm() < 1e-9
    noise = torch.zeros_like(exact[name])
    noise[0, 0] = 9e-5
    assert_rounded({**exact, name: noise}, of_length, model, 1)
    assert_near({**exact, name: noise}, exact)
    noise[0, 0] = error
    with pytest.raises(AssertionError, match=name):
        assert_rounded({**exact, name: noise}, of_length, model, 1)
    with pytest.raises(AssertionError, match=name):
        assert_near({**exact, name: noise}, exact)
