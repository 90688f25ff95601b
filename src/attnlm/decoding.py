"""Logits of the next token, fast: what a CPU computes per token once weights are laid out for it.

A product of one row takes a few microseconds, and so does each call that surrounds it; NumPy's
calls are the cheaper ones. Every form here equals the model's own forward pass up to rounding.

Axes: B samples, S tokens of the window, T new ones among them, N = B·T rows, C embed_dim, H heads,
D head size, F hidden units, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnlm.attention import DotProductAttention, LayerCache, SelfAttention, UniformAttention
from attnlm.device import Device
from attnlm.model import AttentionModel, Bigram, Block, LanguageModel, Transformer

Ids = NDArray[np.int64]
Array = NDArray[Any]
"""Floating-point numbers, in the precision of the model's weights."""

_LARGEST_TABLES = 2**24
_EPSILON = 1e-6


class Decoder(Protocol):
    """What sampling asks for logits."""

    def logits(self, ids_BS: Ids, known: int) -> Array:
        """(B, V) for the token after a window, whose first `known` tokens were there before."""


def new_decoder(model: LanguageModel, num_samples: int, device: Device) -> Decoder:
    """The fastest form of a model on its device that is exact."""
    if device.name != "cpu" or device.dtype != "float32":
        return CachedDecoder(model, device)
    if isinstance(model, Transformer):
        return TransformerDecoder(model, num_samples)
    if isinstance(model, Bigram):
        return BigramDecoder(model)
    if table_size(model) > _LARGEST_TABLES:
        return CachedDecoder(model, device)
    return OneLayerDecoder(model)


class PlainDecoder:
    """The model itself, which computes everything anew each time."""

    def __init__(self, model: LanguageModel, device: Device) -> None:
        self._model, self._device = model, device

    def logits(self, ids_BS: Ids, known: int) -> Array:
        return self._forward(ids_BS, None)

    def _forward(self, ids_BT: Ids, caches: list[LayerCache] | None) -> Array:
        ids = torch.from_numpy(np.ascontiguousarray(ids_BT)).to(self._device.torch)
        with torch.inference_mode(), self._device.autocast():
            logits_BV = self._model(ids, caches)[:, -1]
        return _array(logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float())


class CachedDecoder(PlainDecoder):
    """The model itself with the keys and values of the tokens that it knows: for any device."""

    def __init__(self, model: LanguageModel, device: Device) -> None:
        super().__init__(model, device)
        self._caches = model.new_caches()

    def logits(self, ids_BS: Ids, known: int) -> Array:
        if known == 0:
            for cache in self._caches:
                cache.clear()
        return self._forward(ids_BS[:, known:], self._caches)


class BigramDecoder:
    """Rows of a table."""

    def __init__(self, model: Bigram) -> None:
        self._table_VV = _array(model.table.weight)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        return self._table_VV[ids_BS[:, -1]]


class OneLayerDecoder:
    """One attention layer, from tables of queries, keys and values.

    Its input is token + position, so that each of the three is a token's part plus a position's,
    and both are known beforehand. Nothing is lost when the window slides and each token's position
    changes, so there is nothing to cache.
    """

    def __init__(self, model: AttentionModel) -> None:
        tokens_VC = _array(model.token_embedding.weight)
        positions_SC = _array(model.position_embedding.weight)
        self._heads = _heads(model)
        self._token_query, self._token_key_value = _query_key_value(model, tokens_VC, bias=True)
        self._query, self._key_value = _query_key_value(model, positions_SC, bias=False)
        self._head, self._bias = _array(model.head.weight), _array(model.head.bias)
        projection = getattr(model.body, "projection", None)
        if projection is not None:
            self._bias = self._bias + self._head @ _array(projection.bias)
            self._head = self._head @ _array(projection.weight)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        length, heads = ids_BS.shape[1], self._heads
        query = self._token_query[ids_BS[:, -1]] + self._query[length - 1]
        key_value = self._token_key_value.take(ids_BS, axis=0)
        key_value += self._key_value[:length]
        width = query.shape[-1]
        query_BHD1 = query.reshape(len(ids_BS), heads, -1, 1)
        key_BSHD = key_value[..., :width].reshape(len(ids_BS), length, heads, -1)
        value_BSHD = key_value[..., width:].reshape(len(ids_BS), length, heads, -1)
        scores_BHS = np.matmul(key_BSHD.transpose(0, 2, 1, 3), query_BHD1)[..., 0]
        scores_BHS -= np.maximum.reduce(scores_BHS, -1, keepdims=True)
        mixed_BH1D = _mix(scores_BHS[:, :, None], value_BSHD.transpose(0, 2, 1, 3))
        return _product(mixed_BH1D.reshape(len(ids_BS), -1), self._head) + self._bias


def table_size(model: AttentionModel) -> int:
    """Numbers in the tables that OneLayerDecoder would make."""
    rows = model.vocab_size + model.config.block_size
    return rows * 3 * model.config.num_heads * model.config.head_dim


def _heads(model: AttentionModel) -> int:
    return model.body.heads if isinstance(model.body, SelfAttention) else 1


def _query_key_value(model: AttentionModel, x_NC: Array, bias: bool) -> tuple[Array, Array]:
    """Scaled queries (N, H·D), and keys beside values (N, 2·H·D), of tokens or of positions.

    The bias is to be added to one of the two.
    """
    body = model.body
    if isinstance(body, SelfAttention):
        packed = x_NC @ _array(body.qkv.flatten(0, 1)).T
        if bias and body.qkv_bias is not None:
            packed += _array(body.qkv_bias)
        query, key, value = np.split(packed, 3, axis=1)
        return query * body.head_size**-0.5, np.concatenate((key, value), axis=1)
    assert isinstance(body, DotProductAttention | UniformAttention)
    # Queries of 0 make all scores equal.
    scale = x_NC.shape[1] ** -0.5 if isinstance(body, DotProductAttention) else 0.0
    return x_NC * scale, np.concatenate((x_NC, x_NC), axis=1)


@dataclass(frozen=True)
class _BlockWeights:
    """One block's numbers; the gains of its norms are factors of the matrices that follow."""

    qkv: Array
    """(3·H·D, C)"""
    cosines: Array
    """(block_size, 2·H, 2, D/2) for the heads' queries and then their keys, gains and 1/√D in it"""
    sines: Array
    largest_score: float
    projection: Array
    gate_up: Array
    """(2·F, C), the gate's half of it by 1/2"""
    down: Array


class TransformerDecoder:
    """The transformer with a cache, one row of numbers per new token."""

    def __init__(self, model: Transformer, num_samples: int) -> None:
        config = model.config
        self._heads, self._size = config.num_heads, config.head_dim
        self._embedding_VC = _array(model.token_embedding.weight)
        self._blocks = [_block_weights(model, block) for block in _blocks(model)]
        self._head = _array(model.head.weight) * _gain(model.norm)
        shape = (len(self._blocks), num_samples, self._heads, config.block_size, self._size)
        self._keys_LBHSD = np.empty(shape, self._embedding_VC.dtype)
        self._values_LBHSD = np.empty_like(self._keys_LBHSD)

    def logits(self, ids_BS: Ids, known: int) -> Array:
        new_BT = ids_BS[:, known:]
        with _threads_for(new_BT.size):
            x_NC = self._embedding_VC[new_BT.ravel()]
            for layer, block in enumerate(self._blocks):
                mixed, asked = self._attend(layer, block, _normalised(x_NC), new_BT.shape, known)
                if asked < new_BT.shape[1]:
                    x_NC = x_NC.reshape(*new_BT.shape, -1)[:, -asked:].reshape(len(mixed), -1)
                x_NC = x_NC + _product(mixed, block.projection)
                x_NC += _mlp(block, _normalised(x_NC))
            return _product(_normalised(x_NC), self._head)

    def _attend(
        self, layer: int, block: _BlockWeights, x_NC: Array, new: tuple[int, ...], known: int
    ) -> tuple[Array, int]:
        """The heads' outputs (B·T, H·D) for the T tokens that are asked about, and T.

        After the last layer only the last token counts.
        """
        count, total, heads = new[1], known + new[1], self._heads
        packed = _product(x_NC, block.qkv).reshape(*new, 3 * heads, self._size)
        turned = _rotated(
            _normalised(packed[:, :, : 2 * heads]),
            block.cosines[known:total],
            block.sines[known:total],
        )
        keys, values = self._keys_LBHSD[layer], self._values_LBHSD[layer]
        keys[:, :, known:total] = turned[:, :, heads:].transpose(0, 2, 1, 3)
        values[:, :, known:total] = packed[:, :, 2 * heads :].transpose(0, 2, 1, 3)
        asked = 1 if layer == len(self._blocks) - 1 else count
        query_BHTD = turned[:, -asked:, :heads].transpose(0, 2, 1, 3)
        scores_BHTS = np.matmul(query_BHTD, keys[:, :, :total].transpose(0, 1, 3, 2))
        if block.largest_score > _SAFE_EXPONENT:
            scores_BHTS -= np.maximum.reduce(scores_BHTS, -1, keepdims=True)
        if asked > 1:
            future_TS = ~np.tri(asked, total, total - asked, dtype=bool)
            scores_BHTS[..., future_TS] = -np.inf
        mixed_BHTD = _mix(scores_BHTS, values[:, :, :total])
        return mixed_BHTD.transpose(0, 2, 1, 3).reshape(new[0] * asked, -1), asked


# Below it neither e^x nor a sum of many of them leaves the range of float32.
_SAFE_EXPONENT = 60.0


def _blocks(model: Transformer) -> Iterator[Block]:
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block


def _gain(norm: nn.Module | None) -> Array:
    """The factors of an RMSNorm."""
    assert isinstance(norm, nn.RMSNorm)
    return _array(norm.weight)


def _block_weights(model: Transformer, block: Block) -> _BlockWeights:
    attention, heads = block.attention, block.attention.heads
    assert attention.projection is not None
    query_gain, key_gain = _gain(attention.query_norm), _gain(attention.key_norm)
    scale = attention.head_size**-0.5
    gains = np.stack([query_gain * scale] * heads + [key_gain] * heads)
    gains_H2K = gains.reshape(2 * heads, 2, -1)
    cosines_S12K, sines_S12K = (
        _array(angles).reshape(len(angles), 1, 2, -1) for angles in (model.cosines, model.sines)
    )
    signs_21 = np.array([[-1], [1]], dtype=gains.dtype)
    gate_up = _array(block.mlp.gate_up) * _gain(block.mlp_norm)
    gate_up[0] *= 0.5
    return _BlockWeights(
        qkv=_array(attention.qkv.flatten(0, 1)) * _gain(block.attention_norm),
        cosines=cosines_S12K * gains_H2K,
        sines=sines_S12K * signs_21 * gains_H2K[:, ::-1],
        largest_score=math.sqrt(attention.head_size)
        * float(np.abs(query_gain).max() * np.abs(key_gain).max()),
        projection=_array(attention.projection.weight),
        gate_up=gate_up.reshape(-1, gate_up.shape[-1]),
        down=_array(block.mlp.down.weight),
    )


def _normalised(x: Array) -> Array:
    """x / √(mean(x²) + ε) along the last axis: RMSNorm without its gain."""
    size = x.shape[-1]
    root = np.square(x).dot(np.full(size, 1 / size, x.dtype))
    root += _EPSILON
    np.sqrt(root, root)
    normalised: Array = x / root[..., None]
    return normalised


def _rotated(x_BTHD: Array, cosines_TH2K: Array, sines_TH2K: Array) -> Array:
    """Rotary positions: the halves of a head are what is turned into one another."""
    x_BTH2K = x_BTHD.reshape(*x_BTHD.shape[:-1], 2, -1)
    turned = x_BTH2K * cosines_TH2K
    turned += x_BTH2K[..., ::-1, :] * sines_TH2K
    return turned.reshape(x_BTHD.shape)


def _mix(scores_BHTS: Array, values_BHSD: Array) -> Array:
    """softmax(scores) · values, (B, H, T, D); the scores are overwritten."""
    weights_BHTS = np.exp(scores_BHTS, scores_BHTS)
    mixed: Array = np.matmul(weights_BHTS, values_BHSD)
    mixed /= np.add.reduce(weights_BHTS, -1, keepdims=True)
    return mixed


def _mlp(block: _BlockWeights, x_NC: Array) -> Array:
    """SwiGLU, with silu(2g) = g · (1 + tanh g): no number is too large for it."""
    gate_up = _product(x_NC, block.gate_up)
    hidden = gate_up.shape[1] // 2
    gate, up = gate_up[:, :hidden], gate_up[:, hidden:]
    hidden_NF = np.tanh(gate)
    hidden_NF += 1
    hidden_NF *= gate
    hidden_NF *= up
    return _product(hidden_NF, block.down)


def _product(x_NC: Array, weight_RC: Array) -> Array:
    """x · weightᵀ, (N, R)."""
    if len(x_NC) == 1:
        row: Array = weight_RC.dot(x_NC[0])[None]
        return row
    # For many rows torch's product is faster than NumPy's, and heeds torch's number of threads.
    product: Array = torch.mm(torch.from_numpy(x_NC), torch.from_numpy(weight_RC).T).numpy()
    return product


@contextlib.contextmanager
def _threads_for(rows: int) -> Iterator[None]:
    """One thread where there are few rows: a second one would cost more than it does."""
    threads = torch.get_num_threads()
    if rows >= 256 or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
