"""The attention function, the cache of keys and values, and the attention modules.

Axes: B batch, T new tokens, S all tokens (cached and new), C embed_dim, H heads,
K key and value heads, D head size, E value size, N concatenated outputs of several linear maps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnlm.model.architecture import Architecture
from attnlm.model.layers import Hookable, Linear, RMSNorm, is_plain, joined_linear
from attnlm.model.layers import dropout as dropped
from attnlm.model.ops.attention import fused_attention, shared_heads
from attnlm.model.ops.heads import Rotation, rotate, split_heads


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    scores: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return softmax(mask(q kᵀ / √D)) v (Vaswani et al., 2017).

    query (B, H, T, D), key (B, K, S, D), value (B, K, S, E) → (B, H, T, E). Each key and value
    head serves H / K query heads (Ainslie et al., 2023). The causal mask is aligned to the last
    key: query t sees keys up to S − T + t. The queries can therefore be the newest tokens only, and
    the keys of older tokens can come from a cache.
    `dropout` is the probability with which each attention weight is dropped. `scores` computes
    other scores than q kᵀ / √D from queries and keys: (B, H, T, D), (B, H, S, D) → (B, H, T, S).
    """
    assert query.size(-2) <= key.size(-2), "a causal query without a key of its own"
    if not dropout and scores is None:
        return fused_attention(query, key, value)
    key, value = shared_heads(query.size(-3), key, value)
    if scores is None:
        scores_BHTS = query @ key.mT * query.size(-1) ** -0.5
    else:
        scores_BHTS = scores(query, key)
    later = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool)
    later = later.triu(key.size(-2) - query.size(-2) + 1)
    p_BHTS = torch.softmax(scores_BHTS.masked_fill(later, -torch.inf), -1)
    return (dropped(p_BHTS, dropout) if dropout else p_BHTS) @ value


class LayerCache:
    """The keys and values of one attention layer, for at most `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._stored: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append tensors of new tokens, (..., T, size); return tensors of all, (..., S, size)."""
        if not self._stored:
            self._stored = tuple(n.new_empty(*n.shape[:-2], self.capacity, n.size(-1)) for n in new)
        start = self.length
        self.length += new[0].size(-2)
        for stored, n in zip(self._stored, new, strict=True):
            stored[..., start : self.length, :] = n
        return tuple(stored[..., : self.length, :] for stored in self._stored)


class SelfAttention(Hookable):
    """Causal self-attention with H heads of any size D, all computed together.

    D = C/H gives the usual, narrow heads, and D = C gives wide heads. The outputs of the heads are
    concatenated (width H·D) and, with a projection, mapped to width C. Queries and keys may be
    normalised (Henry et al., 2020) and rotated according to their positions, as in Qwen3.
    """

    scores: nn.Module | None
    """the user's own scores of queries and keys; see `attention`"""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.scores = None
        self.heads = a.heads
        self.kv_heads = a.num_kv_heads
        self.head_size = a.head_dim
        # With a residual stream, dropout applies to the attention's output instead, so that
        # attention kernels without dropout can be used.
        self.dropout = 0.0 if a.residual else a.dropout
        width = a.heads * a.head_dim
        kv_width = a.num_kv_heads * a.head_dim
        std = a.width**-0.5
        # One-layer rungs do not normalise the embeddings: larger initial scores lead to a dead head
        # with some seeds.
        sharp = std if a.residual else 0.35 * std
        self.query = Linear(a.width, width, bias=a.qkv_bias, std=sharp)
        self.key = Linear(a.width, kv_width, bias=a.qkv_bias, std=sharp)
        self.value = Linear(a.width, kv_width, bias=a.qkv_bias, std=std)
        self.query_norm = RMSNorm(a.head_dim, a.norm_epsilon) if a.query_key_norm else None
        self.key_norm = RMSNorm(a.head_dim, a.norm_epsilon) if a.query_key_norm else None
        self.projection = Linear(width, a.width, bias=a.bias) if a.projection else None
        if self.projection is not None and a.residual:
            for parameter in self.projection.parameters():
                nn.init.zeros_(parameter)

    def forward(
        self,
        x_BTC: Tensor,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (B, T, C) → (B, T, C), or (B, T, H·D) without a projection."""
        packed_BTN = joined_linear(x_BTC, (self.query, self.key, self.value))
        query, key, value = self._split(packed_BTN, rotation)
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            key, value = cache.append(key, value)
        mixed_BHTD = attention(query, key, value, dropout=dropout, scores=self.scores)
        mixed = mixed_BHTD.transpose(1, 2).flatten(2)
        return mixed if self.projection is None else self.projection(mixed)

    def _split(
        self, packed_BTN: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split into heads (B, H or K, T, D); normalise and rotate the queries and keys."""
        query_norm = self.query_norm
        key_norm = self.key_norm
        if query_norm is None or key_norm is None:
            return split_heads(packed_BTN, self.heads, self.kv_heads, None, rotation)
        if is_plain(query_norm, RMSNorm) and is_plain(key_norm, RMSNorm):
            gains = (query_norm.gain, key_norm.gain, query_norm.epsilon)
            return split_heads(packed_BTN, self.heads, self.kv_heads, gains, rotation)
        query, key, value = split_heads(packed_BTN, self.heads, self.kv_heads, None, None)
        query = query_norm(query)
        key = key_norm(key)
        if rotation is not None:
            query = rotate(query, *rotation)
            key = rotate(key, *rotation)
        return query, key, value


class ParameterFreeAttention(nn.Module):
    """Attention whose queries, keys and values are the embeddings: it has no parameters.

    If `uniform`, all scores are 0: each token becomes the mean of itself and all tokens before it.
    """

    def __init__(self, *, uniform: bool) -> None:
        super().__init__()
        self.uniform = uniform

    def forward(
        self,
        x_BTC: Tensor,
        rotation: None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (B, T, C) → (B, T, C)."""
        value = x_BTC.unsqueeze(1)
        query = key = torch.zeros_like(value) if self.uniform else value
        if cache is not None:
            key, value = cache.append(key, value)
        return attention(query, key, value).squeeze(1)
