"""The parts of a logit sum to the logit; heads are parts if their outputs are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlm.model import language_model
from attnlm.see.attribution import attribution
from tests.models import (
    VARIANTS,
    V,
    Widened,
    WithoutMaps,
    WithSoftmax,
    self_attention,
    small_model,
    some_ids,
)

IDS = some_ids(13).tolist()


def logit(model: Any, token: int) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([IDS]))[0, -1, token])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parts_sum_to_the_logit(variant: str) -> None:
    model = small_model(variant)
    for token in (0, V - 1):
        parts = attribution(model, IDS, token)
        assert bool(parts) == model.architecture.residual
        if parts:
            total = sum(added for _, added in parts)
            assert total == pytest.approx(logit(model, token), abs=1e-9)
            names = [name for name, _ in parts]
            a = model.architecture
            assert names[0] == "embedding" and len(set(names)) == len(names)
            assert sum("MLP" in name for name in names) == (a.layers if a.mlp != "none" else 0)
            heads = a.heads if a.attention == "softmax" else 0
            assert sum(" head " in name for name in names) == a.layers * heads
            if a.attention not in ("none", "softmax"):
                assert sum("attention" in name for name in names) == a.layers


def test_a_head_that_is_not_read_adds_nothing() -> None:
    model = small_model("gpt2")
    attention = self_attention(model, 1)
    assert attention.projection is not None
    with torch.no_grad():
        attention.projection.weight[:, 2 * attention.head_size : 3 * attention.head_size] = 0
    parts = dict(attribution(model, IDS, 3))
    assert parts["layer 2 head 3"] == 0 and abs(parts["layer 2 head 2"]) > 1e-6
    assert sum(parts.values()) == pytest.approx(logit(model, 3), abs=1e-9)


@pytest.mark.parametrize(("kind", "has_heads"), [(WithSoftmax, 1), (WithoutMaps, 0), (Widened, 0)])
def test_heads_of_another_class_are_listed_only_if_they_sum_to_its_output(
    kind: Any, has_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "SelfAttention", kind)
    model = small_model("transformer")
    parts = dict(attribution(model, IDS, 3))
    assert ("layer 1 head 1" in parts) == has_heads != ("layer 1 attention" in parts)
    assert sum(parts.values()) == pytest.approx(logit(model, 3), abs=1e-9)
