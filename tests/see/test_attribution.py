"""The parts of a logit sum to it."""

from __future__ import annotations

import pytest
import torch

from attnlm.model.recorder import record
from attnlm.see.attribution import attribution
from tests.models import VARIANTS, V, small_model, some_ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parts_sum_to_the_logit(variant: str) -> None:
    model = small_model(variant)
    seen = record(model, some_ids(1, 13))
    for token in (0, V - 1):
        parts = attribution(model, seen, token)
        assert bool(parts) == model.architecture.residual
        if parts:
            total = sum(added for _, added in parts)
            assert total == pytest.approx(float(seen.logits[0, -1, token]), abs=1e-9)
            names = [name for name, _ in parts]
            a = model.architecture
            has = a.attention != "none"
            assert names[0] == "embedding" and len(set(names)) == len(names)
            assert sum("MLP" in name for name in names) == (a.layers if a.mlp != "none" else 0)
            heads = a.heads if a.attention == "softmax" else 0
            assert sum(" head " in name for name in names) == a.layers * heads
            assert any("attention" in name for name in names) or heads or not has


def test_a_silenced_head_adds_nothing() -> None:
    model = small_model("gpt2")
    seen = record(model, some_ids(1, 13), silenced=(1, 2))
    parts = dict(attribution(model, seen, 3))
    assert parts["layer 2 head 3"] == pytest.approx(0, abs=1e-12)
    assert abs(parts["layer 2 head 2"]) > 1e-6
    assert sum(parts.values()) == pytest.approx(float(seen.logits[0, -1, 3]), abs=1e-9)
    assert torch.isfinite(torch.tensor([*parts.values()])).all()
