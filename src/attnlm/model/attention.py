"""The attention function, the cache of keys and values, and the attention modules.

Axes: B batch, T new tokens, S all tokens (cached and new), C embed_dim, H heads,
K key and value heads, D head size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm.model.layers import Dropout, Linear, RMSNorm
from attnlm.model.rotary import rotary_angles

if TYPE_CHECKING:
    from attnlm.model.architecture import Architecture

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (T, D)."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: Callable[[Tensor], Tensor] | None = None,
    scores: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return softmax(mask(q kᵀ / √D)) v (Vaswani et al., 2017).

    query (B, H, T, D), key (B, K, S, D), value (B, K, S, E) → (B, H, T, E). Each key and value
    head serves H / K query heads (Ainslie et al., 2023). The causal mask is aligned to the last
    key: query t sees keys up to S − T + t. The queries can therefore be the newest tokens only, and
    the keys of older tokens can come from a cache.
    `dropout` changes the attention weights, (B, H, T, S). `scores` computes other scores than
    q kᵀ / √D from queries and keys: (B, H, T, D), (B, H, S, D) → (B, H, T, S).
    """
    assert query.size(-2) <= key.size(-2), "a causal query without a key of its own"
    if dropout is None and scores is None:
        return _fused_attention(query, key, value)
    key, value = shared_heads(query.size(-3), key, value)
    if scores is None:
        scores_BHTS = query @ key.mT * query.size(-1) ** -0.5
    else:
        scores_BHTS = scores(query, key)
    later = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool)
    later = later.triu(key.size(-2) - query.size(-2) + 1)
    p_BHTS = torch.softmax(scores_BHTS.masked_fill(later, -torch.inf), -1)
    return (p_BHTS if dropout is None else dropout(p_BHTS)) @ value


def _fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same by PyTorch's kernels, which do not keep all scores in memory."""
    new = query.size(-2)
    total = key.size(-2)
    mask = None
    if 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    in_groups = key.size(-3) < query.size(-3) and mask is None and reads_groups(query)
    if not in_groups:
        key, value = shared_heads(query.size(-3), key, value)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=1 < new == total, enable_gqa=in_groups
    )


def shared_heads(heads: int, *kv: Tensor) -> tuple[Tensor, ...]:
    """Return keys or values (B, K, S, D) repeated for all query heads, (B, H, S, D)."""
    return tuple(
        x if x.size(-3) == heads else x.repeat_interleave(heads // x.size(-3), dim=-3) for x in kv
    )


def reads_groups(query: Tensor) -> bool:
    """Return True if query heads that share keys and values should read them in place, not copies.

    On CUDA, only PyTorch's flash kernel can read them in place, and it needs half precision. On a
    CPU, copies are faster.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
    return query.is_cuda and is_half


def rotation_of(a: Architecture, dtype: torch.dtype = torch.float32) -> Rotation:
    """Return cosines and sines (T, D) of all rotary positions of a model.

    Each feature in the first half of a head is paired with one in the second, as in Llama and Qwen.
    """
    if torch.get_default_device().type == "meta":  # a model's skeleton has no numbers
        return torch.empty(a.block_size, a.head_dim), torch.empty(a.block_size, a.head_dim)
    cosines, sines = map(torch.from_numpy, rotary_angles(a))
    return cosines.to(dtype).repeat(1, 2), sines.to(dtype).repeat(1, 2)


def rotate(x: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
    """Return x, (..., T, D), with each pair of features rotated by its angle at each position."""
    cosines_TD = cosines_TD.to(x.dtype)
    sines_TD = sines_TD.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cosines_TD + torch.cat((-second, first), dim=-1) * sines_TD


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


class SelfAttention(nn.Module):
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
        self.dropout = Dropout(a.dropout) if a.dropout and not a.residual else None
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
        query, key, value = (
            x_BTN.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for x_BTN in (self.query(x_BTC), self.key(x_BTC), self.value(x_BTC))
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is not None:
            key, value = cache.append(key, value)
        dropout = self.dropout if self.dropout is not None and self.dropout.is_active else None
        mixed_BHTD = attention(query, key, value, dropout=dropout, scores=self.scores)
        mixed = mixed_BHTD.transpose(1, 2).flatten(2)
        return mixed if self.projection is None else self.projection(mixed)


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
