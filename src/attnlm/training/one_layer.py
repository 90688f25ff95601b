"""A hand-written loss and gradient for models of one attention layer.

Such a model spends most time on the overhead of operations. The one-layer form in this module has
few operations, allocates memory once, and has no autograd graph. With one layer, queries, keys and
values are functions of a token plus functions of a position, W(e + p) = We + Wp. Both functions are
tabulated, for all tokens of the vocabulary and all positions, and then looked up. Attention and the
loss are in C.

A step under autograd with the same C code takes twice as long.

Axes as in attention.py. M is the number of tokens of a batch, B·T. N is the number of features of
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
        or not model.head.weight.is_cpu
        or (native := native_library()) is None
        or not is_as_built(model)
    ):
        return None
    return OneLayer(model, batch_size, native)


class OneLayer:
    """Loss and gradients of a model of one attention layer, for batches of one size.

    Holds views of the model's parameters and, from the first call on, of their gradients. The
    parameters and gradients must keep their addresses in memory.
    """

    def __init__(self, model: Transformer, batch_size: int, native: CDLL) -> None:
        self._model = model
        self._native = native
        self._parameters = _tensors_by_name(model, Tensor.detach)
        a = model.architecture
        vocab_size = model.vocab_size
        length = a.block_size
        width = a.heads * a.head_dim
        rows = vocab_size + length
        tokens = batch_size * length
        self._batch_size = batch_size
        self._qkv_NC = torch.empty(3 * width, a.width)
        self._embeddings_RC = torch.empty(rows, a.width)
        self._tables_RN = torch.empty(rows, 3 * width)
        self._d_tables_RN = torch.empty(rows, 3 * width)
        self._positions_TN = self._tables_RN[vocab_size:]
        self._d_tokens_VN, self._d_positions_TN = self._d_tables_RN.split((vocab_size, length))
        self._packed_BTN = torch.empty(batch_size, length, 3 * width)
        self._d_packed_BTN = torch.empty_like(self._packed_BTN)
        self._packed_MN = self._packed_BTN.flatten(0, 1)
        self._d_packed_MN = self._d_packed_BTN.flatten(0, 1)
        self._mixed_MC = torch.empty(tokens, width)
        self._d_mixed_MC = torch.empty_like(self._mixed_MC)
        self._projected_MC = self._mixed_MC  # unless there is a projection
        self._logits_VM = torch.empty(vocab_size, tokens + _PADDING)[:, :tokens]
        self._log_sums = torch.empty(batch_size * a.heads * length)
        self._scratch = torch.empty(native.attention_scratch(length, a.head_dim))

    @torch.no_grad()
    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss as `loss` does; add its gradient to every parameter's `grad`."""
        tokens_M = inputs_BT.reshape(-1)
        loss = self.loss(tokens_M, targets_BT)
        self._backward(tokens_M)
        return loss

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss of a batch of the size for which this object was made.

        Unlike in `LanguageModel.loss`, targets below 0 count as targets with a loss of 0. The
        logits are overwritten with the gradient of the loss.
        """
        p = self._parameters
        logits_VM = self._logits_VM
        # Compute the tables, and look up queries, keys and values of the tokens.
        embeddings = (p["token_embedding.weight"], p["position_embedding.weight"])
        torch.cat(embeddings, out=self._embeddings_RC)
        torch.cat([p[name] for name in _QKV], out=self._qkv_NC)
        torch.mm(self._embeddings_RC, self._qkv_NC.T, out=self._tables_RN)
        if "query.bias" in p:
            self._positions_TN += torch.cat([p[name] for name in _QKV_BIASES])
        torch.index_select(self._tables_RN, 0, inputs_BT.reshape(-1), out=self._packed_MN)
        self._packed_BTN += self._positions_TN

        self._attend(None, None)
        if "projection.weight" in p:
            self._projected_MC = self._mixed_MC @ p["projection.weight"].T
            if "projection.bias" in p:
                self._projected_MC += p["projection.bias"]
        bias_V1 = p["head.bias"][:, None]
        x_MC = self._projected_MC
        torch.addmm(bias_V1, p["head.weight"], x_MC.T, out=logits_VM)

        targets_M = targets_BT.reshape(-1)
        loss = torch.zeros((), dtype=torch.float64)
        tokens = targets_M.numel()
        self._native.cross_entropy(
            len(logits_VM),
            tokens,
            logits_VM.stride(0),
            1 / tokens,
            data_pointer(logits_VM),
            data_pointer(targets_M),
            data_pointer(loss),
        )
        return loss.div_(tokens).float()

    def _attend(self, d_mixed_MC: Tensor | None, d_packed_MN: Tensor | None) -> None:
        """Compute the outputs of the heads or, from their gradient, the gradient of q, k and v."""
        a = self._model.architecture
        self._native.attend_packed(
            self._batch_size,
            a.block_size,
            a.heads,
            a.head_dim,
            data_pointer(self._packed_MN),
            data_pointer(self._mixed_MC),
            data_pointer(self._log_sums),
            data_pointer(d_mixed_MC),
            data_pointer(d_packed_MN),
            data_pointer(self._scratch),
        )

    @functools.cached_property
    def _gradients(self) -> dict[str, Tensor]:
        return _tensors_by_name(self._model, operator.attrgetter("grad"))

    def _backward(self, tokens_M: Tensor) -> None:
        """Add the gradient of the loss that was computed last to every parameter's `grad`."""
        p = self._parameters
        d = self._gradients
        x_MC = self._projected_MC
        d_logits_VM = self._logits_VM
        d["head.weight"].addmm_(d_logits_VM, x_MC)
        d["head.bias"] += d_logits_VM.sum(1)
        if "projection.weight" in p:
            d_x_MC = d_logits_VM.T @ p["head.weight"]
            d["projection.weight"].addmm_(d_x_MC.T, self._mixed_MC)
            if "projection.bias" in p:
                d["projection.bias"] += d_x_MC.sum(0)
            torch.mm(d_x_MC, p["projection.weight"], out=self._d_mixed_MC)
        else:
            torch.mm(d_logits_VM.T, p["head.weight"], out=self._d_mixed_MC)

        self._attend(self._d_mixed_MC, self._d_packed_MN)
        self._d_tokens_VN.zero_().index_add_(0, tokens_M, self._d_packed_MN)
        torch.sum(self._d_packed_BTN, 0, out=self._d_positions_TN)
        if "query.bias" in d:
            for name, d_bias in zip(_QKV_BIASES, self._d_positions_TN.sum(0).chunk(3), strict=True):
                d[name] += d_bias
        for name, d_table_RN in zip(_QKV, self._d_tables_RN.chunk(3, 1), strict=True):
            d[name].addmm_(d_table_RN.T, self._embeddings_RC)
        d["token_embedding.weight"].addmm_(self._d_tokens_VN, self._qkv_NC)
        d["position_embedding.weight"].addmm_(self._d_positions_TN, self._qkv_NC)


def _tensors_by_name(
    model: Transformer, tensor_of: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Map each parameter's name, without the prefix of the block, to `tensor_of(parameter)`."""
    named = model.named_parameters()
    return {n.removeprefix("blocks.0.attention."): tensor_of(parameter) for n, parameter in named}
