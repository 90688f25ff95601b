"""The attention function against an explicit softmax, and the modules that mix tokens by it.

Sizes are different primes, so that swapped axes fail.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attnlm.model.attention import ParameterFreeAttention, SelfAttention, attention
from attnlm.model.ops import attention as kernels
from attnlm.model.ops.attention import reads_groups, shared_heads
from attnlm.model.presets import architecture
from tests.tolerances import assert_near

B, T, H, D = 2, 11, 3, 5
C = H * D


def explicit_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every query against every key that it may see, one query at a time."""
    mixed = []
    for t in range(query.size(-2)):
        seen = key.size(-2) - query.size(-2) + t + 1
        scores = (query[..., t, None, :] * key[..., :seen, :]).sum(-1) * query.size(-1) ** -0.5
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        mixed.append((weights[..., None] * value[..., :seen, :]).sum(-2))
    return torch.stack(mixed, -2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dropout", [0.0, 1e-30])  # of the latter nothing is dropped
@pytest.mark.parametrize("new", [1, 4, T])
def test_attention_equals_an_explicit_softmax(new: int, dropout: float) -> None:
    """The mask is aligned to the last key."""
    query, key = torch.randn(B, 6, new, D).double(), torch.randn(B, H, T, D).double()
    value = torch.randn(B, H, T, 7).double()
    found = attention(query, key, value, dropout=dropout)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, explicit_attention(query, key, value))


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    query = key = torch.zeros(1, 1, 1000, 4)
    mixed = attention(query, key, torch.ones(1, 1, 1000, 1), dropout=0.25)
    assert mixed.std() > 0.001
    assert mixed[0, 0, 500:].mean().item() == pytest.approx(1.0, abs=0.02)


def test_loop_triangle_and_masked_softmax_give_the_same_mean() -> None:
    """R3: a loop, a normalised triangle, the softmax of a masked zero matrix; and our rung."""
    x_BTC = torch.randn(B, T, C)
    loop = torch.stack([x_BTC[:, : t + 1].mean(1) for t in range(T)], dim=1)
    triangle = torch.ones(T, T).tril()
    product = (triangle / triangle.sum(1, keepdim=True)) @ x_BTC
    masked = torch.zeros(T, T).masked_fill(triangle == 0, -math.inf).softmax(-1) @ x_BTC
    for way in (product, masked, ParameterFreeAttention(uniform=True)(x_BTC)):
        assert_near(way, loop, within=1e-6)


@pytest.mark.parametrize("head_size", [D, C, 2])
@pytest.mark.parametrize("projection", [True, False])
def test_fused_heads_equal_separate_heads(head_size: int, projection: bool) -> None:
    """R4's two forms with the same weights; with head_size C, R5's wide heads."""
    parts = {"embed_dim": C, "heads": H, "head_size": head_size, "projection": projection}
    fused = SelfAttention(architecture("multi-head", {**parts, "qkv_bias": True})).double()
    for parameter in fused.parameters():
        torch.nn.init.normal_(parameter)
    x_BTC = torch.randn(B, T, C).double()
    separate = []
    for head in range(H):
        rows = slice(head * head_size, (head + 1) * head_size)
        query, key, value = (
            x_BTC @ m.weight[rows].T + m.bias[rows] for m in (fused.query, fused.key, fused.value)
        )
        separate.append(explicit_attention(query, key, value))
    expected = torch.cat(separate, -1)
    if fused.projection is not None:
        expected = fused.projection(expected)
    torch.testing.assert_close(fused(x_BTC), expected)
    assert expected.shape == (B, T, C if projection else H * head_size)


def test_grouped_heads_are_read_without_a_copy_where_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's half-precision kernel takes grouped heads unless there is a mask; same numbers."""
    query, key, value = (torch.randn(B, heads, T, D) for heads in (6, H, H))
    assert not reads_groups(query) and not reads_groups(query.bfloat16())
    expected = [explicit_attention(query[:, :, -n:], *shared_heads(6, key, value)) for n in (T, 1)]
    copied: list[Tensor] = []

    def without_copies(heads: int, *kv: Tensor) -> tuple[Tensor, ...]:
        copied.extend(kv)
        return kv

    monkeypatch.setattr(kernels, "reads_groups", lambda query: True)
    monkeypatch.setattr(kernels, "shared_heads", without_copies)
    for new, wanted in zip((T, 1), expected, strict=True):
        assert_near(attention(query[:, :, -new:], key, value), wanted, within=1e-5)
    assert not copied
    with pytest.raises(RuntimeError):  # the stand-in for a copy makes none
        attention(query[:, :, -4:], key, value)
    assert copied


class Equal(nn.Module):
    """Scores of a user's, all 0: each token attends to itself and the past equally."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query.new_zeros(*query.shape[:3], key.size(2))


def test_own_scores_take_the_place_of_scaled_products() -> None:
    module = SelfAttention(architecture("multi-head", {"embed_dim": C, "heads": H}))
    x_BTC = torch.randn(B, T, C)
    module.scores = Equal()
    expected = ParameterFreeAttention(uniform=True)(module.value(x_BTC))
    torch.testing.assert_close(module(x_BTC), expected)
