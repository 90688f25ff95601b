"""The attention function against an explicit softmax, and each fused form against its plain one.

Sizes are different primes, so that swapped axes fail.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm.attention import (
    SHORT,
    LayerCache,
    SelfAttention,
    UniformAttention,
    attention,
    rotary_angles,
    rotate,
)

B, T, H, D = 2, 11, 3, 5
C = H * D


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """Every query against every key, one by one, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    new, total = query.size(-2), key.size(-2)
    mixed = torch.zeros(*query.shape[:-1], value.size(-1), dtype=torch.float64)
    for t in range(new):
        seen = total - new + t + 1 if causal else total
        scores = torch.stack([(query[..., t, :] * key[..., s, :]).sum(-1) for s in range(seen)], -1)
        scores = scores * (query.size(-1) ** -0.5 if scale is None else scale)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        mixed[..., t, :] = sum(weights[..., s, None] * value[..., s, :] for s in range(seen))
    return mixed


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@pytest.mark.parametrize("new", [1, 4, T])
def test_attention_equals_an_explicit_softmax(causal: bool, scale: float | None, new: int) -> None:
    query, key = torch.randn(B, H, new, D), torch.randn(B, H, T, D)
    value = torch.randn(B, H, T, 7)
    got = attention(query, key, value, causal=causal, scale=scale)
    expected = explicit_attention(query, key, value, causal=causal, scale=scale)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    query = key = torch.zeros(1, 1, 1000, 4)
    value = torch.ones(1, 1, 1000, 1)
    mixed = attention(query, key, value, dropout=0.25)
    assert mixed.std() > 0.001
    assert mixed[0, 0, 500:].mean().item() == pytest.approx(1.0, abs=0.02)


def test_scale_may_sit_on_queries_and_keys_alike() -> None:
    """R5: k^¼ on both sides is √k on one."""
    query, key, value = torch.randn(3, B, H, T, D).double()
    root = D**-0.25
    both = attention(query * root, key * root, value, scale=1.0)
    torch.testing.assert_close(both, attention(query, key, value))


def test_three_ways_of_averaging_the_past_agree() -> None:
    """R3: a loop, a normalised triangle, the softmax of a masked zero matrix; and our rung."""
    x_BTC = torch.randn(B, T, C)
    loop = torch.stack([x_BTC[:, : t + 1].mean(1) for t in range(T)], dim=1)
    triangle = torch.ones(T, T).tril()
    product = (triangle / triangle.sum(1, keepdim=True)) @ x_BTC
    masked = torch.zeros(T, T).masked_fill(triangle == 0, -math.inf).softmax(-1) @ x_BTC
    ours = UniformAttention()(x_BTC)
    for way in (product, masked, ours):
        torch.testing.assert_close(way, loop, atol=1e-6, rtol=1e-5)


class SeparateHeads(nn.Module):
    """The lecture's way: each head a module of its own, outputs concatenated."""

    def __init__(self, fused: SelfAttention) -> None:
        super().__init__()
        self.fused = fused
        heads, size = fused.heads, fused.head_size
        self.weights = fused.qkv.view(3, heads, size, -1)
        bias = fused.qkv_bias
        self.biases = torch.zeros(3, heads, size) if bias is None else bias.view(3, heads, size)

    def forward(self, x_BTC: Tensor) -> Tensor:
        outputs = [self._head(x_BTC, head) for head in range(self.fused.heads)]
        concatenated = torch.cat(outputs, dim=-1)
        projection = self.fused.projection
        return concatenated if projection is None else projection(concatenated)

    def _head(self, x_BTC: Tensor, head: int) -> Tensor:
        query, key, value = (
            x_BTC @ self.weights[i, head].T + self.biases[i, head] for i in range(3)
        )
        return explicit_attention(query, key, value).to(x_BTC.dtype)


@pytest.mark.parametrize("head_size", [D, C, 2])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("projection", [True, False])
def test_fused_heads_equal_separate_heads(head_size: int, qkv_bias: bool, projection: bool) -> None:
    """R4's two forms with the same weights; with head_size C, R5's wide heads."""
    fused = SelfAttention(C, H, head_size, qkv_bias=qkv_bias, projection=projection).double()
    if fused.qkv_bias is not None:
        nn.init.normal_(fused.qkv_bias)
    x_BTC = torch.randn(B, T, C).double()
    torch.testing.assert_close(fused(x_BTC), SeparateHeads(fused)(x_BTC))
    assert fused(x_BTC).shape == (B, T, C if projection else H * head_size)


def test_heads_drop_weights_only_in_training() -> None:
    module = SelfAttention(C, H, D, dropout=0.5)
    x_BTC = torch.randn(B, T, C)
    assert not torch.equal(module(x_BTC), module(x_BTC))
    module.eval()
    torch.testing.assert_close(module(x_BTC), SeparateHeads(module)(x_BTC), atol=1e-5, rtol=1e-4)


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    size = 6
    query_D, key_D = torch.randn(2, size).double()
    cosines, sines = (table.double() for table in rotary_angles(T, size))
    queries = rotate(query_D.expand(T, size), cosines, sines)
    keys = rotate(key_D.expand(T, size), cosines, sines)
    products = queries @ keys.T
    for distance in range(-3, 4):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-6, rtol=0)
    assert products[0].std() > 0.01
    torch.testing.assert_close(queries.norm(dim=-1), query_D.norm().expand(T), atol=1e-6, rtol=0)


def test_cache_returns_everything_appended_until_cleared() -> None:
    cache = LayerCache(T)
    keys, values = torch.randn(B, H, T, D), torch.randn(B, H, T, 7)
    cache.append(keys[:, :, :4], values[:, :, :4])
    got = cache.append(keys[:, :, 4:6], values[:, :, 4:6])
    assert cache.length == 6
    assert torch.equal(got[0], keys[:, :, :6]) and torch.equal(got[1], values[:, :, :6])
    cache.clear()
    assert torch.equal(cache.append(keys[:, :, 7:8], values[:, :, 7:8])[0], keys[:, :, 7:8])


def test_query_and_key_norms_are_applied_per_head() -> None:
    size = 6  # features are turned in pairs
    module = SelfAttention(C, H, size, rotary=True).double()
    x_BTC = torch.randn(B, T, C).double()
    packed = F.linear(x_BTC, module.qkv.flatten(0, 1)).view(B, T, 3, H, size)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    query, key = (v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() for v in (query, key))
    expected = explicit_attention(query, key, value).transpose(1, 2).flatten(2)
    unturned = torch.ones(T, size).double(), torch.zeros(T, size).double()
    torch.testing.assert_close(module(x_BTC, unturned), expected)


def test_long_contexts_go_to_the_kernel_that_holds_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes nothing but vectors whose numbers lie side by side; rotary heads' do not."""
    strides: list[int] = []
    original = F.scaled_dot_product_attention

    def watched(*tensors: Tensor, **options: object) -> Tensor:
        strides.extend(x.stride(-1) for x in tensors)
        mixed: Tensor = original(*tensors, **options)  # type: ignore[arg-type]
        return mixed

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    module = SelfAttention(C, H, 2 * D, rotary=True)
    module(torch.randn(B, SHORT + 1, C), rotary_angles(SHORT + 1, 2 * D))
    assert strides == [1, 1, 1]
