"""The forward pass in plain textbook form, with everything on the way kept to be looked at.

It computes from the model's weights what the model computes, without its fast paths; tests hold
the two equal. Axes as in attention.py, but for the batch: ids are (..., T), and whatever axes stand
before T stay before all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlm.base.errors import AttnlmError
from attnlm.model.attention import (
    RMS_EPSILON,
    DotProductAttention,
    SelfAttention,
    UniformAttention,
    rotate,
)
from attnlm.model.models import AttentionModel, Bigram, Block, LanguageModel, Transformer

Head = tuple[int, int]
"""A head's place: layer and number in it, both from 0."""


@dataclass(frozen=True)
class Heads:
    """What the heads of one layer did; queries and keys (H, T, D), values (H, T, E)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    """scale · q kᵀ before the mask, (H, T, T)"""
    weights: Tensor
    """softmax of the masked scores, (H, T, T)"""
    mixed: Tensor
    """weights · v, (H, T, E)"""


@dataclass(frozen=True)
class Layer:
    """One layer: what its heads read, what they did, what came of it. All but `heads` (T, C)."""

    read: Tensor
    heads: Heads
    attended: Tensor
    """the heads' outputs side by side, mapped back where there is a projection"""
    mlp: Tensor | None
    """what the MLP adds; None where there is none"""
    stream: Tensor
    """what comes after it: in a transformer the residual stream, else `attended`"""


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    embedded: Tensor | None
    """token embeddings and, where they are added, positions, (T, C); None for bigram"""
    layers: tuple[Layer, ...]
    logits: Tensor
    """(T, V)"""

    @property
    def weights(self) -> Tensor:
        """Every head's attention weights, (L, ..., H, T, T).

        Raises AttnlmError for bigram, which has no attention.
        """
        if not self.layers:
            raise AttnlmError(
                "a bigram has no attention: only the last token counts",
                "look at another rung: attnlm train --model single-head",
            )
        return torch.stack([layer.heads.weights for layer in self.layers])


@torch.inference_mode()
def explicit_pass(model: LanguageModel, ids_T: Tensor, *, silenced: Head | None = None) -> Pass:
    """The model's forward pass over ids (..., T), T at most block_size, without dropout.

    The output of the head `silenced`, if any, is set to zero before it goes on.
    """
    if isinstance(model, Bigram):
        return Pass(None, (), model.table.weight[ids_T])
    if isinstance(model, Transformer):
        return _transformer(model, ids_T, silenced)
    x_TC = model.token_embedding.weight[ids_T] + model.position_embedding.weight[: ids_T.size(-1)]
    layer = _one_layer(model, x_TC, silenced[1] if silenced else None)
    return Pass(x_TC, (layer,), read_out(model, layer.stream))


def read_out(model: AttentionModel | Transformer, x_TC: Tensor) -> Tensor:
    """What the LM head, after the last norm where there is one, makes of a stream: (T, V)."""
    if isinstance(model, Transformer):
        normed_TC = _rms_norm(x_TC, model.norm.gain)
        logits_TV: Tensor = normed_TC @ model.head.weight.T
        return logits_TV
    return x_TC @ model.head.weight.T + model.head.bias


def _one_layer(model: AttentionModel, x_TC: Tensor, silenced: int | None) -> Layer:
    body = model.body
    if isinstance(body, SelfAttention):
        heads = _attend(*_queries_keys_values(body, x_TC), silenced)
    elif isinstance(body, DotProductAttention):
        heads = _attend(*(x_TC[..., None, :, :],) * 3, silenced)
    else:
        assert isinstance(body, UniformAttention)
        nothing_HT1 = torch.zeros_like(x_TC[..., None, :, :1])
        heads = _attend(nothing_HT1, nothing_HT1, x_TC[..., None, :, :], silenced)
    attended_TC = _joined(heads, body)
    return Layer(x_TC, heads, attended_TC, None, attended_TC)


def _transformer(model: Transformer, ids_T: Tensor, silenced: Head | None) -> Pass:
    embedded_TC = x_TC = model.token_embedding.weight[ids_T]
    rotation = model.cosines[: ids_T.size(-1)], model.sines[: ids_T.size(-1)]
    layers = []
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        head = silenced[1] if silenced and silenced[0] == number else None
        layers.append(_block(block, x_TC, rotation, head))
        x_TC = layers[-1].stream
    return Pass(embedded_TC, tuple(layers), read_out(model, x_TC))


def _block(
    block: Block, x_TC: Tensor, rotation: tuple[Tensor, Tensor], silenced: int | None
) -> Layer:
    attention = block.attention
    assert attention.query_gain is not None and attention.key_gain is not None
    read_TC = _rms_norm(x_TC, block.attention_norm.gain)
    query_HTD, key_HTD, value_HTD = _queries_keys_values(attention, read_TC)
    query_HTD = rotate(_rms_norm(query_HTD, attention.query_gain), *rotation)
    key_HTD = rotate(_rms_norm(key_HTD, attention.key_gain), *rotation)
    heads = _attend(query_HTD, key_HTD, value_HTD, silenced)
    attended_TC = _joined(heads, attention)
    between_TC = x_TC + attended_TC
    gate_FC, up_FC = block.mlp.gate_up
    mlp_read_TC = _rms_norm(between_TC, block.mlp_norm.gain)
    hidden_TF = F.silu(mlp_read_TC @ gate_FC.T) * (mlp_read_TC @ up_FC.T)
    mlp_TC = hidden_TF @ block.mlp.down.weight.T
    return Layer(read_TC, heads, attended_TC, mlp_TC, between_TC + mlp_TC)


def _queries_keys_values(body: SelfAttention, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each (..., H, T, D)."""
    bias = body.qkv_bias if body.qkv_bias is not None else torch.zeros(3, device=x_TC.device)
    query, key, value = (
        (x_TC @ matrix.T + part).unflatten(-1, (body.heads, body.head_size)).transpose(-3, -2)
        for matrix, part in zip(body.qkv, bias.chunk(3), strict=True)
    )
    return query, key, value


def _attend(query_HTD: Tensor, key_HTD: Tensor, value_HTE: Tensor, silenced: int | None) -> Heads:
    length, size = query_HTD.shape[-2:]
    scores_HTS = query_HTD @ key_HTD.mT / size**0.5
    later_TS = torch.ones(length, length, dtype=torch.bool, device=query_HTD.device).triu(1)
    weights_HTS = torch.softmax(scores_HTS.masked_fill(later_TS, -torch.inf), -1)
    mixed_HTE = weights_HTS @ value_HTE
    if silenced is not None:
        mixed_HTE[..., silenced, :, :] = 0
    return Heads(query_HTD, key_HTD, value_HTE, scores_HTS, weights_HTS, mixed_HTE)


def _joined(heads: Heads, body: object) -> Tensor:
    side_by_side = heads.mixed.transpose(-3, -2).flatten(-2)
    projection = getattr(body, "projection", None)
    if projection is None:
        return side_by_side
    mapped: Tensor = side_by_side @ projection.weight.T
    return mapped if projection.bias is None else mapped + projection.bias


def _rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + RMS_EPSILON).sqrt() * gain
