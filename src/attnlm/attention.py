"""The attention function, its cache, and the one module that every attention rung is made of.

Axes: B batch, T new tokens, S all tokens (those in the cache and the new ones), C embed_dim,
H heads, D head size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlm import kernels

# A longer context takes PyTorch's kernels, which never hold all weights at once.
SHORT = 256

RMS_EPSILON = 1e-6


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(mask(scale · q kᵀ)) v (Vaswani et al., 2017).

    query (..., T, D), key (..., S, D), value (..., S, E) → (..., T, E). `scale` is 1/√D unless
    given. The causal mask is aligned to the last key: query t sees keys up to S − T + t, so the
    newest tokens can be asked about while the older ones' keys come from a cache. `dropout` is the
    probability with which each attention weight is dropped.
    """
    new, total = query.size(-2), key.size(-2)
    assert not causal or new <= total, "a causal query without a key of its own"
    if dropout == 0 and 1 < new == total <= SHORT and kernels.suits(query):
        scale = query.size(-1) ** -0.5 if scale is None else scale
        return kernels.attention(query, key, value, causal, scale)
    # Elsewhere PyTorch has only a slower kernel, which holds all weights.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    mask = None
    if causal and 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and 1 < new == total,
        scale=scale,
    )


class LayerCache:
    """What one attention layer remembers of the tokens so far: at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._stored: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Adds tensors (..., T, size) for T new tokens; returns them for all: (..., S, size)."""
        if not self._stored:
            self._stored = tuple(n.new_empty(*n.shape[:-2], self.capacity, n.size(-1)) for n in new)
        start, self.length = self.length, self.length + new[0].size(-2)
        for stored, n in zip(self._stored, new, strict=True):
            stored[..., start : self.length, :] = n
        return tuple(stored[..., : self.length, :] for stored in self._stored)

    def clear(self) -> None:
        """Forgets every token, and keeps the memory for the next ones."""
        self.length = 0


class SelfAttention(nn.Module):
    """Causal self-attention with H heads of any size D, computed for all heads at once.

    D = C/H is the usual, narrow multi-head attention; D = C the wide one. The outputs (H·D wide)
    are concatenated and, with `projection`, mapped back to C. With `rotary`, each head's queries
    and keys are normalised (Henry et al., 2020) and turned by their positions, as in Qwen3.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        head_size: int,
        *,
        qkv_bias: bool = False,
        projection: bool = False,
        projection_bias: bool = True,
        rotary: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.head_size, self.dropout = heads, head_size, dropout
        # Three matrices in one parameter: one product computes them, Muon still sees each.
        self.qkv = nn.Parameter(torch.empty(3, heads * head_size, embed_dim))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * heads * head_size)) if qkv_bias else None
        nn.init.normal_(self.qkv, std=embed_dim**-0.5)
        self.query_gain = nn.Parameter(torch.ones(head_size)) if rotary else None
        self.key_gain = nn.Parameter(torch.ones(head_size)) if rotary else None
        width = heads * head_size
        self.projection = nn.Linear(width, embed_dim, bias=projection_bias) if projection else None

    def forward(
        self,
        x_BTC: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, T, C) → (B, T, C), or (B, T, H·D) without a projection."""
        packed = F.linear(x_BTC, self.qkv.flatten(0, 1), self.qkv_bias)
        if self.query_gain is not None and self.key_gain is not None:
            assert rotation is not None
            gains_2D = torch.stack((self.query_gain, self.key_gain))
            heads_3BHTD = rotary_heads(packed, gains_2D, rotation)
        else:
            heads_3BHTD = split_heads(packed, self.head_size)
        query_BHTD, key_BHTD, value_BHTD = heads_3BHTD.unbind()
        if cache is not None:
            key_BHTD, value_BHTD = cache.append(key_BHTD, value_BHTD)
        dropout = self.dropout if self.training else 0.0
        mixed_BHTD = attention(query_BHTD, key_BHTD, value_BHTD, dropout=dropout)
        mixed = mixed_BHTD.transpose(1, 2).flatten(2)
        return mixed if self.projection is None else self.projection(mixed)


class UniformAttention(nn.Module):
    """Each token becomes the mean of itself and those before it: all scores are equal."""

    def forward(self, x_BTC: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        new = x_BTC.size(1)
        (past_BSC,) = cache.append(x_BTC) if cache is not None else (x_BTC,)
        zeros = past_BSC.new_zeros(past_BSC.size(0), past_BSC.size(1), 1)
        return attention(zeros[:, -new:], zeros, past_BSC)


class DotProductAttention(nn.Module):
    """Attention of the embeddings to themselves, without parameters."""

    def forward(self, x_BTC: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        (past_BSC,) = cache.append(x_BTC) if cache is not None else (x_BTC,)
        return attention(x_BTC, past_BSC, past_BSC)


def rotary_angles(length: int, head_size: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, head_size) of rotary positions (Su et al., 2021).

    The two halves of a head hold the pairs, as in Llama and Qwen.
    """
    # NumPy, since a model's skeleton must not load what torch.arange needs on the meta device.
    frequencies = base ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.tile(np.arange(length)[:, None] * frequencies, 2)
    cosines, sines = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    return torch.from_numpy(cosines), torch.from_numpy(sines)


def rotate(x_BHTD: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
    """Turns each pair of numbers in a head by the angle of its position."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cosines_TD + torch.cat((-second, first), dim=-1) * sines_TD


def split_heads(packed_BTC: Tensor, head_size: int) -> Tensor:
    """Queries, keys and values side by side, (B, T, 3·H·D), taken apart: (3, B, H, T, D)."""
    batch, new, width = packed_BTC.shape
    heads = packed_BTC.view(batch, new, 3, width // (3 * head_size), head_size)
    return heads.permute(2, 0, 3, 1, 4)


def rotary_heads(packed_BTC: Tensor, gains_2D: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """As `split_heads`, but queries and keys are RMS-normalised, with the gains (2, D), and turned.

    `rotation` holds the cosines and sines, each (T, D), of the T tokens' positions.
    """
    if packed_BTC.size(1) > 1 and kernels.suits(packed_BTC):
        return kernels.rotary_heads(packed_BTC, gains_2D, rotation, RMS_EPSILON)
    heads_3BHTD = split_heads(packed_BTC, gains_2D.size(-1))
    unit = rms_norm(heads_3BHTD[:2], gains_2D.new_ones(gains_2D.size(-1)))
    turned = rotate(unit * gains_2D[:, None, None, None], *rotation)
    return torch.cat((turned, heads_3BHTD[2:]))


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x / √(mean x² + ε) · gain over the last axis (Zhang and Sennrich, 2019)."""
    if kernels.suits(x):
        return kernels.rms_norm(x, gain, RMS_EPSILON)
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), RMS_EPSILON)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned gain (C,)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return rms_norm(x, self.gain)
