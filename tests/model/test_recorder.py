"""A recorder is told what the model computes. Its logits are for test_textbook.py to check."""

from __future__ import annotations

import pytest
import torch

from attnlm.base.errors import AttnlmError
from attnlm.model.language_model import Transformer
from attnlm.model.recorder import record
from tests.models import VARIANTS, V, self_attention, small_model, some_ids

B, T = 3, 13
WITHOUT = [name for name in VARIANTS if name == "bigram" or "attention=none" in name]
ATTENDING = [variant for variant in VARIANTS if variant not in WITHOUT]


@pytest.mark.parametrize("variant", ATTENDING)
@torch.no_grad()
def test_what_is_recorded_fits_together(variant: str) -> None:
    model = small_model(variant)
    assert isinstance(model, Transformer)
    a = model.architecture
    recorder = record(model, some_ids(B, T))
    weights = recorder.weights
    assert weights.shape == (a.layers, B, a.maps_per_layer, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert not weights.triu(1).any() and (weights >= 0).all()
    stream = recorder.embedded
    assert stream is not None
    for number, layer in enumerate(recorder.layers):
        heads, attended = layer.heads, layer.attended
        assert heads is not None and attended is not None and layer.stream is not None
        scale = heads.query.size(-1) ** -0.5
        torch.testing.assert_close(heads.scores, heads.query @ heads.key.mT * scale)
        torch.testing.assert_close(heads.mixed, heads.weights @ heads.value)
        mixed = heads.mixed.transpose(1, 2).flatten(2)
        if a.projection and (projection := self_attention(model, number).projection) is not None:
            mixed = projection(mixed)
        torch.testing.assert_close(attended, mixed)
        assert (layer.mlp is None) == (layer.mlp_read is None) == (a.mlp == "none")
        if a.norm == "none":
            torch.testing.assert_close(layer.read, stream)
        stream = stream + attended if a.residual else attended
        if layer.mlp is not None:
            stream = stream + layer.mlp if a.residual else layer.mlp
        torch.testing.assert_close(layer.stream, stream)
    torch.testing.assert_close(model.read_out(stream), recorder.logits)
    if a.attention == "uniform":
        expected = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
        torch.testing.assert_close(weights, expected.double().expand_as(weights))


@pytest.mark.parametrize("variant", WITHOUT)
def test_without_attention_there_are_no_weights(variant: str) -> None:
    with pytest.raises(AttnlmError, match="no attention"):
        _ = record(small_model(variant), some_ids(B, T)).weights


@pytest.mark.parametrize(
    "variant", ["multi-head", VARIANTS[12], "wide-head", "transformer", "gpt2"]
)
@torch.no_grad()
def test_a_silenced_head_is_one_without_values(variant: str) -> None:
    model = small_model(variant)
    a = model.architecture
    layer, head = a.layers - 1, a.heads - 1
    recorder = record(model, some_ids(B, T), silenced=(layer, head))
    attention = self_attention(model, layer)
    attention.value.weight[head * a.head_dim :] = 0
    if a.qkv_bias:
        attention.value.bias[head * a.head_dim :] = 0
    torch.testing.assert_close(recorder.logits, model(some_ids(B, T)))
    assert recorder.logits.shape == (B, T, V)
    for number, one in enumerate(recorder.layers):
        assert one.heads is not None
        silent = one.heads.mixed.flatten(2).eq(0).all(2).all(0)
        assert silent.tolist() == [(number, h) == (layer, head) for h in range(a.heads)]
