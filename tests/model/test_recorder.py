"""Attention weights and other activations that a recorder observes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm.base.errors import AttnlmError
from attnlm.model.language_model import Transformer
from attnlm.model.recorder import Site, record, silence
from tests.models import (
    V,
    WithoutCache,
    WithSoftmax,
    activations,
    self_attention,
    small_model,
    some_ids,
    variants_where,
)

B, T = 3, 13
ATTENDING = variants_where(lambda spec: spec.has_attention)
WITHOUT = variants_where(lambda spec: not spec.has_attention)


@pytest.mark.parametrize("variant", ATTENDING)
@torch.no_grad()
def test_recorded_activations_are_consistent(variant: str) -> None:
    model = small_model(variant)
    assert isinstance(model, Transformer)
    a = model.architecture
    recorder = record(model, some_ids(B, T))
    maps = recorder.maps
    assert maps.shape == (a.layers, B, a.maps_per_layer, T, T)
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    assert not maps.triu(1).any() and (maps >= 0).all()
    seen = activations(model, some_ids(B, T))
    stream = seen[Site("stream", -1)]
    for number in range(a.layers):
        attended = seen[Site("heads", number)].transpose(1, 2).flatten(2)
        if a.projection and (projection := self_attention(model, number).projection) is not None:
            attended = projection(attended)
        torch.testing.assert_close(seen[Site("attention", number)], attended)
        assert (Site("mlp", number) in seen) == (a.mlp != "none")
        for added in (attended, seen.get(Site("mlp", number))):
            if added is not None:
                stream = stream + added if a.residual else added
        torch.testing.assert_close(seen[Site("stream", number)], stream)
    torch.testing.assert_close(model.read_out(stream), recorder.logits)


@pytest.mark.parametrize("variant", WITHOUT)
def test_models_without_attention_have_no_maps(variant: str) -> None:
    with pytest.raises(AttnlmError, match="no attention"):
        _ = record(small_model(variant), some_ids(B, T)).maps


@pytest.mark.parametrize(
    "variant",
    ["multi-head", "multi-head:projection=true:qkv_bias=true", "wide-head", "transformer", "gpt2"],
)
@torch.no_grad()
def test_silencing_equals_zero_values(variant: str) -> None:
    model = small_model(variant)
    a = model.architecture
    layer, head = a.layers - 1, a.heads - 1
    logits = record(model, some_ids(B, T), silence((layer, head))).logits
    seen = activations(model, some_ids(B, T), silence((layer, head)))
    attention = self_attention(model, layer)
    attention.value.weight[head * a.head_dim :] = 0
    if a.qkv_bias:
        attention.value.bias[head * a.head_dim :] = 0
    torch.testing.assert_close(logits, model(some_ids(B, T)))
    assert logits.shape == (B, T, V)
    for number in range(a.layers):
        silent = seen[Site("heads", number)].flatten(2).eq(0).all(2).all(0)
        assert silent.tolist() == [(number, h) == (layer, head) for h in range(a.heads)]


@pytest.mark.parametrize("kind", [WithoutCache, WithSoftmax])
@torch.no_grad()
def test_a_class_from_outside_is_observed(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced = silence((1, 0))
    expected = record(small_model("gpt2"), some_ids(B, T))
    expected_logits = record(small_model("gpt2"), some_ids(B, T), silenced).logits
    monkeypatch.setattr("attnlm.model.language_model.SelfAttention", kind)
    model = small_model("gpt2")
    torch.testing.assert_close(record(model, some_ids(B, T)).maps, expected.maps)
    torch.testing.assert_close(record(model, some_ids(B, T), silenced).logits, expected_logits)


LATER = torch.ones(T, T, dtype=torch.bool).triu(1)


class Lecture(nn.Module):
    """Heads in a list, and no blocks: the model itself computes each map."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for head in self.heads:
            x = x + self.mix(head(x), x)
        return torch.softmax(x @ self.embedding.weight.T, -1)  # (B, T, V) is not a map

    def mix(self, query: Tensor, x: Tensor) -> Tensor:
        return torch.softmax((query @ x.mT).masked_fill(LATER, -torch.inf), -1) @ x


class Fused(Lecture):
    """The same with one call, of a single head without an axis for heads."""

    def mix(self, query: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, x, x, is_causal=True, scale=1.0)


@pytest.mark.parametrize("kind", [Lecture, Fused])
def test_each_map_of_a_model_without_blocks_is_a_layer(kind: type[Lecture]) -> None:
    model, ids = kind(), some_ids(B, T)
    recorder = record(model, ids)
    assert recorder.maps.shape == (3, B, 1, T, T)
    torch.testing.assert_close(recorder.logits, model(ids))
    without = record(model, ids, silence((2, 0))).logits
    assert not without.isclose(model(ids)).all()


class FoldedHeads(nn.Module):
    """Heads that are folded into the batch, (B·H, T, T)."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (4, 2)).transpose(1, 2).flatten(0, 1)
        weights = (heads @ heads.mT).masked_fill(LATER, -torch.inf).softmax(-1)
        mixed: Tensor = torch.matmul(weights, heads).unflatten(0, (-1, 4))
        return mixed.transpose(1, 2).flatten(2)


class ListedHeads(nn.Module):
    """Heads in a list, which read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(ListedHead() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class ListedHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).masked_fill(LATER, -torch.inf).softmax(-1)
        return torch.matmul(weights, super().forward(x))


class DistantHeads(nn.Module):
    """Weights of four heads that depend on the distance only: (H, T, T) for all texts."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.arange(T)[:, None] - torch.arange(T)
        scores = (-self.rates * distance).masked_fill(LATER, -torch.inf)
        mixed: Tensor = torch.softmax(scores, -1) @ x.unflatten(-1, (4, 2)).transpose(1, 2)
        return mixed.transpose(1, 2).flatten(2)


class TwoLayers(nn.Module):
    def __init__(self, heads: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 8)
        self.layers = nn.ModuleList((heads(), heads()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = x @ self.embedding.weight.T
        return logits


@pytest.mark.parametrize("heads", [FoldedHeads, ListedHeads, DistantHeads])
def test_heads_that_read_the_same_tensor_are_a_layer(heads: type[nn.Module]) -> None:
    model, ids = TwoLayers(heads), some_ids(B, T)
    recorder = record(model, ids)
    assert recorder.maps.shape == (2, B, 4, T, T)
    torch.testing.assert_close(recorder.maps.sum(-1), torch.ones(2, B, 4, T))
    torch.testing.assert_close(recorder.logits, model(ids))
    without = record(model, ids, silence((1, 3))).logits
    assert not without.isclose(model(ids)).all()


class Twice(Lecture):
    """Each map is used twice, also on values of another width, and there are products of others."""

    def mix(self, query: Tensor, x: Tensor) -> Tensor:
        scores = torch.matmul(input=query, other=x.mT)
        weights = torch.softmax(scores.masked_fill(LATER, -torch.inf), -1)
        rows = F.scaled_dot_product_attention(x[0], x[0], x[0])
        return (weights @ x) * torch.sigmoid(weights @ (2 * x[..., :1])) + weights @ (
            weights @ rows
        )


def test_a_recording_changes_nothing() -> None:
    model, ids = Twice(), some_ids(B, T)
    recorder = record(model, ids)
    assert recorder.maps.shape == (3, B, 1, T, T)
    assert recorder.logits.equal(model(ids))


def test_hooks_are_removed_after_a_recording() -> None:
    model = small_model("transformer")
    record(model, some_ids(B, T))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
