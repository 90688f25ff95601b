"""A hand-written loss and gradient for models of one attention layer.

Such a model spends most time on the overhead of operations. The one-layer form in this module has
few operations and no autograd graph. With one layer, queries, keys and
values are functions of a token plus functions of a position, W(e + p) = We + Wp. Both functions are
tabulated, for all tokens of the vocabulary and all positions, and then looked up. Attention and the
loss are in C.

A step under autograd with the same C code takes twice as long.

Axes as in layers.py. M is the number of tokens of a batch, B·T. N is the number of features of
queries, keys and values side by side, 3·H·D. R is the number of rows of the tables, V + T.
`d_x` is the gradient of the loss with respect to x.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from ctypes import CDLL

import torch
from torch import Tensor
from torch.nn import functional

from attnlm.compute.device import Device
from attnlm.compute.native import native_library
from attnlm.model.inspection import is_as_built
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.native_block import data_pointer
from attnlm.model.spec import ModelSpec, is_ours

# Unused numbers at the end of each row of the logits: rows at distances of a power of two would map
# to the same few sets of a cache.
_PADDING = 16

_QKV = ("query.weight", "key.weight", "value.weight")
_QKV_BIASES = ("query.bias", "key.bias", "value.bias")


def is_one_layer(spec: ModelSpec, vocab_size: int, tokens: int) -> bool:
    """Return True if the one-layer form computes this model in batches of `tokens` tokens.

    The result is False if the vocabulary has more than `tokens` ids, since the tables would then
    have more rows than a batch looks up.
    """
    if not is_ours(spec) or vocab_size > tokens:
        return False
    is_rung = spec.attention == "softmax" and spec.positions == "learned" and spec.layers == 1
    others = spec.norm, spec.mlp, spec.residual, spec.query_key_norm, spec.tie_embeddings
    is_rung = is_rung and others == ("none", "none", False, False, False) and not spec.dropout
    return is_rung and spec.head_bias and spec.num_kv_heads == spec.heads


def one_layer_form(model: LanguageModel, batch_size: int, device: Device) -> OneLayer | None:
    """Return the model in one-layer form, or None if the model or device do not allow it.

    A model that was changed from outside is left to its modules.
    """
    if (
        not isinstance(model, Transformer)
        or not is_one_layer(model.spec, model.vocab_size, batch_size * model.block_size)
        or (device.name, device.dtype) != ("cpu", "float32")
        or model.head.weight.dtype != torch.float32
        or (native := native_library()) is None
        or not is_as_built(model)
    ):
        return None
    return OneLayer(model, batch_size, native)


class OneLayer:
    """Loss and gradients of a model of one attention layer, for batches of one size.

    Holds views of the model's parameters. They and their gradients must keep their addresses in
    memory.
    """

    def __init__(self, model: Transformer, batch_size: int, native: CDLL) -> None:
        self._model = model
        self._batch_size = batch_size
        self._native = native
        self._parameters = _tensors_by_name(model, Tensor.detach)
        a = model.architecture
        self._scratch = torch.empty(native.attention_scratch(a.block_size, a.head_dim))

    @torch.no_grad()
    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss as `loss` does; add its gradient to every parameter's `grad`."""
        loss, *kept = self._forward(inputs_BT, targets_BT)
        self._backward(inputs_BT.reshape(-1), *kept)
        return loss

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss of a batch of the size for which this object was made.

        Unlike in `LanguageModel.loss`, targets below 0 count as targets with a loss of 0.
        """
        return self._forward(inputs_BT, targets_BT)[0]

    def _forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        """Return the loss, and what `_backward` needs after the tokens."""
        p, a = self._parameters, self._model.architecture
        # Compute the tables, and look up queries, keys and values of the tokens.
        embeddings_RC = torch.cat((p["token_embedding.weight"], p["position_embedding.weight"]))
        qkv_NC = torch.cat([p[name] for name in _QKV])
        tables_RN = embeddings_RC @ qkv_NC.T
        positions_TN = tables_RN[-a.block_size :]
        if "query.bias" in p:
            positions_TN += torch.cat([p[name] for name in _QKV_BIASES])
        packed_BTN = functional.embedding(inputs_BT, tables_RN)
        packed_BTN += positions_TN
        tokens = inputs_BT.numel()
        mixed_MC = torch.empty(tokens, a.heads * a.head_dim)
        log_sums = torch.empty(tokens * a.heads)
        self._attend(packed_BTN, mixed_MC, log_sums, None, None)
        x_MC = mixed_MC
        if "projection.weight" in p:
            x_MC = mixed_MC @ p["projection.weight"].T
            if "projection.bias" in p:
                x_MC += p["projection.bias"]
        logits_VM = torch.empty(self._model.vocab_size, tokens + _PADDING)[:, :tokens]
        torch.addmm(p["head.bias"][:, None], p["head.weight"], x_MC.T, out=logits_VM)
        targets_M = targets_BT.reshape(-1)
        loss = torch.zeros((), dtype=torch.float64)
        self._native.cross_entropy(  # overwrites the logits with the gradient of the loss
            len(logits_VM),
            tokens,
            logits_VM.stride(0),
            1 / tokens,
            *map(data_pointer, (logits_VM, targets_M, loss)),
        )
        loss = loss.div_(tokens).float()
        return loss, embeddings_RC, qkv_NC, packed_BTN, mixed_MC, log_sums, x_MC, logits_VM

    def _attend(self, *tensors: Tensor | None) -> None:
        """Compute the outputs of the heads or, from their gradient, the gradient of q, k and v.

        The tensors are q, k and v, the outputs, the logarithms of the sums in softmax, and the two
        gradients, which are None in the forward pass.
        """
        a = self._model.architecture
        pointers = map(data_pointer, (*tensors, self._scratch))
        self._native.attend_packed(self._batch_size, a.block_size, a.heads, a.head_dim, *pointers)

    @functools.cached_property
    def _gradients(self) -> dict[str, Tensor]:
        return _tensors_by_name(self._model, operator.attrgetter("grad"))

    def _backward(
        self,
        tokens_M: Tensor,
        embeddings_RC: Tensor,
        qkv_NC: Tensor,
        packed_BTN: Tensor,
        mixed_MC: Tensor,
        log_sums: Tensor,
        x_MC: Tensor,
        d_logits_VM: Tensor,
    ) -> None:
        """Add the gradient of the loss to every parameter's `grad`."""
        p, d = self._parameters, self._gradients
        d["head.weight"].addmm_(d_logits_VM, x_MC)
        d["head.bias"] += d_logits_VM.sum(1)
        d_mixed_MC = d_logits_VM.T @ p["head.weight"]
        if "projection.weight" in p:
            d["projection.weight"].addmm_(d_mixed_MC.T, mixed_MC)
            if "projection.bias" in p:
                d["projection.bias"] += d_mixed_MC.sum(0)
            d_mixed_MC = d_mixed_MC @ p["projection.weight"]
        d_packed_BTN = torch.empty_like(packed_BTN)
        self._attend(packed_BTN, mixed_MC, log_sums, d_mixed_MC, d_packed_BTN)
        d_tables_RN = torch.zeros(len(embeddings_RC), len(qkv_NC))
        d_tokens_VN, d_positions_TN = d_tables_RN.tensor_split([self._model.vocab_size])
        d_tokens_VN.index_add_(0, tokens_M, d_packed_BTN.flatten(0, 1))
        torch.sum(d_packed_BTN, 0, out=d_positions_TN)
        if "query.bias" in d:
            for name, d_bias in zip(_QKV_BIASES, d_positions_TN.sum(0).chunk(3), strict=True):
                d[name] += d_bias
        for name, d_table_RN in zip(_QKV, d_tables_RN.chunk(3, 1), strict=True):
            d[name].addmm_(d_table_RN.T, embeddings_RC)
        d["token_embedding.weight"].addmm_(d_tokens_VN, qkv_NC)
        d["position_embedding.weight"].addmm_(d_positions_TN, qkv_NC)


def _tensors_by_name(
    model: Transformer, tensor_of: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Map each parameter's name, without the prefix of the block, to `tensor_of(parameter)`."""
    named = model.named_parameters()
    return {n.removeprefix("blocks.0.attention."): tensor_of(parameter) for n, parameter in named}
