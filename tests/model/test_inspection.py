"""Tests that recognise models which somebody changed from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attnlm.model.inspection import is_as_built
from attnlm.model.language_model import Transformer
from attnlm.model.layers import RMSNorm
from tests.models import CHANGES, VARIANTS, self_attention, small_model


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_as_its_settings_make_it(name: str) -> None:
    model = small_model(name).float()
    assert is_as_built(model) and is_as_built(model.train())


def norm_of(model: Transformer) -> RMSNorm:
    assert isinstance(model.norm, RMSNorm)
    return model.norm


class Doubled(nn.Linear):
    """A linear map of somebody else."""


OF_INSTANCES: dict[str, Callable[[Transformer], object]] = {
    "an attribute": lambda model: setattr(norm_of(model), "epsilon", 0.5),
    "an attribute that is a tensor": lambda model: setattr(
        norm_of(model), "epsilon", torch.tensor([0.5, 0.5])
    ),
    "a method": lambda model: setattr(norm_of(model), "forward", lambda x: x),
    "a hook": lambda model: self_attention(model).query.register_forward_hook(lambda *_: None),
    "a size": lambda model: setattr(model, "head", nn.Linear(7, 9)),
    "a part": lambda model: setattr(model, "head", Doubled(*model.head.weight.shape[::-1])),
    "a part that is left out": lambda model: setattr(model, "norm", None),
}


@pytest.mark.parametrize("change", OF_INSTANCES)
def test_a_changed_instance_is_noticed(change: str) -> None:
    model = small_model("transformer")
    assert isinstance(model, Transformer)
    OF_INSTANCES[change](model)
    assert not is_as_built(model)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_classes_are_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, other = CHANGES[change]
    assert is_as_built(small_model("transformer"))
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    model: Any = small_model("transformer")
    assert not is_as_built(model)
