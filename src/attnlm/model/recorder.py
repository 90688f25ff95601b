"""Records of a model's forward pass: what each head attends to, and what each part computes.

A model's `forward` stores its intermediate results in the Recorder that is passed to it, so the
recorded numbers are exactly the model's. A Recorder can also silence one head.

Axes as in attention.py; L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlm.base.errors import AttnlmError
from attnlm.compute.threads import FlushingHere
from attnlm.model.architecture import Architecture

Head = tuple[int, int]
"""The position of a head: its layer and its number in the layer, both from 0."""


@dataclass(frozen=True)
class Heads:
    """The heads of one layer. Queries are (B, H, T, D); keys and values are repeated to H heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    """before the mask, (B, H, T, S)"""
    weights: Tensor
    """softmax of the masked scores, (B, H, T, S)"""
    mixed: Tensor
    """weights · v, (B, H, T, E)"""


@dataclass
class Layer:
    """The inputs and outputs of one block, (B, T, C); None for parts that the block lacks."""

    read: Tensor | None = None
    """the input of the attention, after the norm"""
    heads: Heads | None = None
    attended: Tensor | None = None
    """the heads' outputs, concatenated, after the projection if the model has one"""
    mlp_read: Tensor | None = None
    """the input of the MLP, after the norm"""
    mlp: Tensor | None = None
    """the output of the MLP"""
    stream: Tensor | None = None
    """the output of the block"""


@dataclass
class Recorder:
    """The record of one forward pass. The output of the head `silenced`, if any, is set to zero.

    If `watch` is set, the heads are not recorded. Instead, `watch` receives each layer's attention
    weights, (B, H, T, S), in the order of the layers. For many heads and a long text, a record of
    all weights and scores takes gigabytes.
    """

    silenced: Head | None = None
    watch: Callable[[Tensor], None] | None = None
    embedded: Tensor | None = None
    """token embeddings plus position embeddings, if any, (B, T, C); None for a bigram"""
    layers: list[Layer] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """the output of the model, (B, T, V)"""

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, weights: Tensor
    ) -> Tensor:
        """Return weights · v, with the silenced head set to zero; record the arguments."""
        mixed = weights @ value
        if self.silenced is not None and self.silenced[0] == len(self.layers) - 1:
            mixed[..., self.silenced[1], :, :] = 0
        if self.watch is None:
            self.layers[-1].heads = Heads(query, key, value, scores, weights, mixed)
        else:
            self.watch(weights)
        return mixed

    def has_maps(self, a: Architecture) -> bool:
        """Return True if each layer has recorded as many attention maps as its settings say."""
        recorded = [
            0 if layer.heads is None else layer.heads.weights.size(1) for layer in self.layers
        ]
        return bool(a.maps_per_layer) and recorded == [a.maps_per_layer] * a.layers

    @property
    def weights(self) -> Tensor:
        """Return every head's attention weights, (L, B, H, T, S).

        Raises AttnlmError for a model without attention.
        """
        found = [layer.heads.weights for layer in self.layers if layer.heads is not None]
        if not found:
            raise no_attention()
        return torch.stack(found)


class NotRecordedError(AttnlmError):
    """Raised when the attention of a model, a class from outside, does not record its weights."""

    def __init__(self) -> None:
        super().__init__(
            "the attention of this model does not record its weights, so there are no maps",
            "let its method forward call `recorder.mix`, as attnlm's SelfAttention does",
        )


def no_attention() -> AttnlmError:
    """Return the error for a model without attention."""
    return AttnlmError(
        "this model has no attention, so there are no maps",
        "use another model, such as single-head",
    )


@torch.inference_mode()
def record(
    model: Callable[..., Tensor],
    tokens_BT: Tensor,
    silenced: Head | None = None,
    watch: Callable[[Tensor], None] | None = None,
) -> Recorder:
    """Record one forward pass over at most block_size tokens, (B, T)."""
    recorder = Recorder(silenced, watch)
    with FlushingHere():
        recorder.logits = model(tokens_BT, recorder=recorder)
    return recorder
