"""The explicit forward pass is the model's own, and its weights are those that attention uses."""

from __future__ import annotations

import pytest
import torch
from attnlm.model.explicit import explicit_pass
from attnlm.model.models import LanguageModel
from torch import Tensor

import attnlm.model.attention
from attnlm.base.errors import AttnlmError
from attnlm.config.settings import RUNGS
from attnlm.model.attention import SelfAttention
from tests.test_model import B, T, V, a_model, scrambled

ATTENDING = [rung for rung in RUNGS if rung != "bigram"]
LAYERS = {"transformer": 3}
HEADS = {"multi-head": 5, "wide-head": 5, "transformer": 11}


@pytest.fixture(name="ids_BT")
def some_ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))


def models(rung: str) -> list[LanguageModel]:
    """The rung, and where it has options that change its parts, the rung with them."""
    options: list[dict[str, bool | float]] = [{}]
    if rung == "multi-head":
        options += [{"head_size": 3}, {"projection": True, "qkv_bias": True}]
    if rung == "transformer":
        options += [{"tie_embeddings": True}]
    return [scrambled(a_model(rung, **option)).eval() for option in options]


@pytest.mark.parametrize("rung", RUNGS)
def test_logits_equal_the_models(rung: str, ids_BT: Tensor) -> None:
    for model in models(rung):
        model.double()
        wanted_BTV = model(ids_BT)
        torch.testing.assert_close(explicit_pass(model, ids_BT).logits, wanted_BTV)
        for row, ids_T in enumerate(ids_BT):
            torch.testing.assert_close(explicit_pass(model, ids_T).logits, wanted_BTV[row])
        short_T = ids_BT[0, :4]
        torch.testing.assert_close(explicit_pass(model, short_T).logits, model(short_T[None])[0])


@pytest.mark.parametrize("rung", ATTENDING)
def test_weights_are_those_that_attention_uses(
    rung: str, ids_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    plain = attnlm.model.attention.attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: float) -> Tensor:
        # Values that are unit vectors give the weights themselves.
        used.append(plain(query, key, torch.eye(key.size(-2)).expand(*key.shape[:-1], -1)))
        return plain(query, key, value)

    monkeypatch.setattr(attnlm.attention, "attention", watched)
    for model in models(rung):
        used.clear()
        model(ids_BT[:1])
        weights_LHTT = explicit_pass(model, ids_BT[0]).weights
        assert weights_LHTT.shape == (LAYERS.get(rung, 1), HEADS.get(rung, 1), T, T)
        torch.testing.assert_close(weights_LHTT, torch.stack(used).view_as(weights_LHTT))
        assert not weights_LHTT.triu(1).any()
        torch.testing.assert_close(weights_LHTT.sum(-1), torch.ones(weights_LHTT.shape[:-1]))


def test_average_looks_at_everything_alike(ids_BT: Tensor) -> None:
    weights = explicit_pass(a_model("average"), ids_BT[0]).weights[0, 0]
    torch.testing.assert_close(weights, torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None])


def test_a_bigram_has_no_weights(ids_BT: Tensor) -> None:
    with pytest.raises(AttnlmError, match="no attention"):
        _ = explicit_pass(a_model("bigram"), ids_BT[0]).weights


def test_the_stream_leads_to_the_logits(ids_BT: Tensor) -> None:
    (model,) = models("transformer")[:1]
    seen = explicit_pass(model, ids_BT[0])
    assert seen.embedded is not None
    stream_TC = seen.embedded
    for layer in seen.layers:
        assert layer.mlp is not None
        stream_TC = stream_TC + layer.attended + layer.mlp
        torch.testing.assert_close(layer.stream, stream_TC)


@pytest.mark.parametrize("rung", ["dot-product", "multi-head", "wide-head", "transformer"])
def test_a_silenced_head_is_one_without_values(rung: str, ids_BT: Tensor) -> None:
    model = models(rung)[-1].double()
    whole = explicit_pass(model, ids_BT)
    layer, head = LAYERS.get(rung, 1) - 1, HEADS.get(rung, 1) - 1
    without = explicit_pass(model, ids_BT, silenced=(layer, head))
    assert not without.layers[layer].heads.mixed[:, head].any()
    assert torch.equal(
        without.layers[layer].heads.mixed[:, :head],
        whole.layers[layer].heads.mixed[:, :head],
    )
    if rung != "dot-product":
        body = [m for m in model.modules() if isinstance(m, SelfAttention)][layer]
        size = body.head_size
        with torch.no_grad():
            body.qkv[2, head * size : (head + 1) * size] = 0
            if body.qkv_bias is not None:
                body.qkv_bias.view(3, -1)[2, head * size : (head + 1) * size] = 0
        torch.testing.assert_close(without.logits, model(ids_BT))
