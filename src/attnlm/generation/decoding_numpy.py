"""Decoders whose weights are laid out for one token at a time, in NumPy.

A product of one row takes a few microseconds, and so does each call that surrounds it; NumPy's
calls are the cheaper ones.

Axes: B samples, S tokens of the window, T new ones among them, N = B·T rows, C embed_dim, H heads,
D head size, F hidden units, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnlm.model.attention import (
    RMS_EPSILON,
    DotProductAttention,
    SelfAttention,
    UniformAttention,
)
from attnlm.model.models import AttentionModel, Block, Transformer

Ids = NDArray[np.int64]
Array = NDArray[Any]
"""Floating-point numbers, in the precision of the model's weights."""

# Where no score is further from 0, neither e^score nor sums of many leave the range of float32.
_SAFE_EXPONENT = 60.0


class OneLayerDecoder:
    """One attention layer, from tables of queries, keys and values.

    Its input is token + position, so that each of the three is a token's part plus a position's,
    and both are known beforehand. Nothing is lost when the window slides and each token's position
    changes, so there is nothing to cache.
    """

    def __init__(self, model: AttentionModel) -> None:
        tokens_VC = as_array(model.token_embedding.weight)
        positions_SC = as_array(model.position_embedding.weight)
        self.token_queries, self.token_keys_values = _tables(model, tokens_VC)
        self.position_queries, self.position_keys_values = _tables(model, positions_SC, True)
        size = self.token_queries.shape[-1]
        self._largest_score = _largest(self.token_queries, self.position_queries) * _largest(
            self.token_keys_values[..., :size], self.position_keys_values[..., :size]
        )
        self.head, self.bias = as_array(model.head.weight), as_array(model.head.bias)
        projection = getattr(model.body, "projection", None)
        if projection is not None:
            self.bias = self.bias + self.head @ as_array(projection.bias)
            self.head = self.head @ as_array(projection.weight)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        length = ids_BS.shape[1]
        query_BHD = self.token_queries[ids_BS[:, -1]] + self.position_queries[length - 1]
        key_value_BSHE = self.token_keys_values.take(ids_BS, axis=0)
        key_value_BSHE += self.position_keys_values[:length]
        size = query_BHD.shape[-1]
        key_BHDS = key_value_BSHE[..., :size].transpose(0, 2, 3, 1)
        value_BHSD = key_value_BSHE[..., size:].transpose(0, 2, 1, 3)
        scores_BH1S = np.matmul(query_BHD[:, :, None], key_BHDS)
        if self._largest_score > _SAFE_EXPONENT:
            scores_BH1S -= np.maximum.reduce(scores_BH1S, -1, keepdims=True)
        mixed_BH1D = _mix(scores_BH1S, value_BHSD)
        return _product(mixed_BH1D.reshape(len(ids_BS), -1), self.head) + self.bias


def table_size(model: AttentionModel) -> int:
    """Numbers in the tables that OneLayerDecoder would make."""
    rows = model.vocab_size + model.config.block_size
    return rows * 3 * model.config.num_heads * model.config.head_dim


def _tables(model: AttentionModel, x_NC: Array, positions: bool = False) -> tuple[Array, Array]:
    """Scaled queries (N, H, D), and keys, values and a 1 in a row (N, H, 2·D + 1).

    Biases and the 1 are the tokens' part of the sum of both.
    """
    body = model.body
    if isinstance(body, SelfAttention):
        packed = x_NC @ as_array(body.qkv.flatten(0, 1)).T
        if body.qkv_bias is not None and not positions:
            packed += as_array(body.qkv_bias)
        query, key, value = packed.reshape(len(x_NC), 3, body.heads, -1).swapaxes(0, 1)
        scale = body.head_size**-0.5
    else:
        assert isinstance(body, DotProductAttention | UniformAttention)
        query = key = value = x_NC[:, None]
        # Queries of 0 make all scores equal.
        scale = x_NC.shape[1] ** -0.5 if isinstance(body, DotProductAttention) else 0.0
    last = np.full((*value.shape[:-1], 1), 0.0 if positions else 1.0, x_NC.dtype)
    return query * scale, np.concatenate((key, value, last), axis=-1)


def _largest(tokens_VHD: Array, positions_SHD: Array) -> float:
    """No token's vector and position's vector have a longer sum."""
    longest = (np.linalg.norm(part, axis=-1).max() for part in (tokens_VHD, positions_SHD))
    return float(sum(longest))


@dataclass(frozen=True)
class _BlockWeights:
    """One block's numbers; the gains of its norms are factors of the matrices that follow.

    In queries and keys the two numbers that a rotary position turns lie side by side.
    """

    qkv: Array
    """(3·H·D, C)"""
    gains: Array
    """(2·H, D) for queries and then keys, 1/√D in it"""
    largest_score: float
    projection: Array
    gate_up: Array
    """(2·F, C), the gate's half of it negated"""
    down: Array
    """(C, F), negated for that"""


class TransformerDecoder:
    """The transformer with a cache, one row of numbers per new token."""

    def __init__(self, model: Transformer, num_samples: int) -> None:
        config = model.config
        self._heads, self._size = config.num_heads, config.head_dim
        self._embedding_VC = as_array(model.token_embedding.weight)
        self._turns_S1K = _turns(model)
        self._blocks = [_block_weights(block) for block in blocks_of(model)]
        self._head = as_array(model.head.weight) * as_array(model.norm.gain)
        shape = (num_samples, self._heads, config.block_size, self._size)
        dtype = self._embedding_VC.dtype
        self._keys_BHSD = [np.empty(shape, dtype) for _ in self._blocks]
        # A last column of ones: there the softmax's denominator appears. Set as tokens come, so
        # that a long context takes memory only for what is in it.
        self._values_BHSD = [np.empty((*shape[:-1], self._size + 1), dtype) for _ in self._blocks]

    def logits(self, ids_BS: Ids, known: int) -> Array:
        new_BT = ids_BS[:, known:]
        x_NC = self._embedding_VC[new_BT.ravel()]
        with _threads_for(new_BT.size):
            for layer, block in enumerate(self._blocks):
                packed = _product(_normalised(x_NC), block.qkv)
                query_BTHD = self._remember(
                    layer, packed.reshape(*new_BT.shape, -1, self._size), known
                )
                if layer == len(self._blocks) - 1 and new_BT.shape[1] > 1:
                    # Only the last token's logits are wanted.
                    query_BTHD = query_BTHD[:, -1:]
                    x_NC = x_NC.reshape(*new_BT.shape, -1)[:, -1]
                mixed_NE = self._attend(layer, query_BTHD, ids_BS.shape[1])
                x_NC = x_NC + _product(mixed_NE, block.projection)
                x_NC += _mlp(block, _normalised(x_NC))
            return _product(_normalised(x_NC), self._head)

    def _remember(self, layer: int, packed_BTHD: Array, known: int) -> Array:
        """Keeps the new tokens' keys and values; returns their queries, (B, T, H, D)."""
        heads, total = self._heads, known + packed_BTHD.shape[1]
        turned_BTHD = _normalised(packed_BTHD[:, :, : 2 * heads])
        turned_BTHD *= self._blocks[layer].gains
        pairs_BTHK = turned_BTHD.view(self._turns_S1K.dtype)
        pairs_BTHK *= self._turns_S1K[known:total]
        new_keys, new_values = turned_BTHD[:, :, heads:], packed_BTHD[:, :, 2 * heads :]
        self._keys_BHSD[layer][:, :, known:total] = new_keys.transpose(0, 2, 1, 3)
        self._values_BHSD[layer][:, :, known:total, :-1] = new_values.transpose(0, 2, 1, 3)
        self._values_BHSD[layer][:, :, known:total, -1] = 1
        return turned_BTHD[:, :, :heads]

    def _attend(self, layer: int, query_BTHD: Array, total: int) -> Array:
        """What the newest T of `total` tokens gather, (B·T, H·D)."""
        count = query_BTHD.shape[1]
        keys_BHSD = self._keys_BHSD[layer][:, :, :total]
        scores_BHTS = np.matmul(query_BTHD.transpose(0, 2, 1, 3), keys_BHSD.transpose(0, 1, 3, 2))
        if count > 1:
            scores_BHTS[..., ~np.tri(count, total, total - count, dtype=bool)] = -np.inf
        if self._blocks[layer].largest_score > _SAFE_EXPONENT:
            scores_BHTS -= np.maximum.reduce(scores_BHTS, -1, keepdims=True)
        mixed_BHTD = _mix(scores_BHTS, self._values_BHSD[layer][:, :, :total])
        return mixed_BHTD.transpose(0, 2, 1, 3).reshape(len(query_BTHD) * count, -1)


def blocks_of(model: Transformer) -> Iterator[Block]:
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block


def _block_weights(block: Block) -> _BlockWeights:
    attention = block.attention
    heads, size = attention.heads, attention.head_size
    assert attention.projection is not None
    assert attention.query_gain is not None and attention.key_gain is not None
    qkv = as_array(attention.qkv.flatten(0, 1)) * as_array(block.attention_norm.gain)
    qkv_3HDC = qkv.reshape(3, heads, size, -1)
    # From two halves, as the model has them, to pairs.
    paired = np.arange(size).reshape(2, -1).T.ravel()
    qkv_3HDC[:2] = qkv_3HDC[:2, :, paired]
    query_gain, key_gain = as_array(attention.query_gain), as_array(attention.key_gain)
    gains = np.stack([query_gain * size**-0.5] * heads + [key_gain] * heads)
    gate_up = as_array(block.mlp.gate_up) * as_array(block.mlp_norm.gain)
    gate_up[0] *= -1
    return _BlockWeights(
        qkv=qkv,
        gains=gains[:, paired],
        largest_score=float(np.abs(query_gain).max() * np.abs(key_gain).max()) * math.sqrt(size),
        projection=as_array(attention.projection.weight),
        gate_up=gate_up.reshape(-1, gate_up.shape[-1]),
        down=-as_array(block.mlp.down.weight),
    )


def _turns(model: Transformer) -> Array:
    """Rotary positions as complex numbers of length 1, (block_size, 1, D/2)."""
    cosines, sines = as_array(model.cosines), as_array(model.sines)
    half = cosines.shape[-1] // 2
    turns: Array = cosines[:, None, :half] + 1j * sines[:, None, :half]
    return turns


def _normalised(x: Array) -> Array:
    """x / √(mean(x²) + ε) along the last axis: RMSNorm without its gain."""
    size = x.shape[-1]
    if x.size == size:
        row = x.ravel()
        single: Array = x * (1 / math.sqrt(float(row.dot(row)) / size + RMS_EPSILON))
        return single
    root = np.square(x).dot(_averaging(size, x.dtype))
    root += RMS_EPSILON
    normalised: Array = x / np.sqrt(root, root)[..., None]
    return normalised


@functools.cache
def _averaging(size: int, dtype: np.dtype[Any]) -> Array:
    return np.full(size, 1 / size, dtype)


def _mix(scores_BHTS: Array, values_BHSD: Array) -> Array:
    """softmax(scores) · values, (B, H, T, D), for values that end in a 1.

    The scores are overwritten.
    """
    sums_BHTD = np.matmul(np.exp(scores_BHTS, scores_BHTS), values_BHSD)
    mixed: Array = sums_BHTD[..., :-1] / sums_BHTD[..., -1:]
    return mixed


def _mlp(block: _BlockWeights, x_NC: Array) -> Array:
    """SwiGLU, with silu(g) = −(−g) / (1 + e^−g): the two signs are in the weights."""
    gate_up = _product(x_NC, block.gate_up)
    hidden = gate_up.shape[1] // 2
    gate = gate_up[:, :hidden]
    divisor_NF = np.exp(gate)
    divisor_NF += 1
    gate *= gate_up[:, hidden:]
    return _product(np.divide(gate, divisor_NF, divisor_NF), block.down)


def _product(x_NC: Array, weight_RC: Array) -> Array:
    """x · weightᵀ, (N, R)."""
    if len(x_NC) == 1:
        row: Array = weight_RC.dot(x_NC[0])[None]
        return row
    # For many rows torch's product is faster than NumPy's, and heeds torch's number of threads.
    product: Array = torch.mm(torch.from_numpy(x_NC), torch.from_numpy(weight_RC).T).numpy()
    return product


def _threads_for(rows: int) -> contextlib.AbstractContextManager[None]:
    """One thread where there are few rows: a second one would cost more than it does."""
    return contextlib.nullcontext() if rows >= 256 else one_thread()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
