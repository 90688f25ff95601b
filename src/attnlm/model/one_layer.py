"""The loss of the one-layer rungs and its gradient, written out.

A model this small spends its time between operations, not in them. So there are few: products for
all heads at once, into memory that is taken once, and no graph. Since there is one layer, queries,
keys and values are functions of a token plus functions of a position, W(e + p) = We + Wp; they are
computed once for each token of the vocabulary, and then looked up.

Axes as in attention.py. M counts the tokens of a batch, B·T; N the heads of all its windows,
B·H; R the rows of the tables, V + T. Features stand before positions, (D, T), as in kernels.py.
`d_x` is the gradient of the loss by x.
"""

from __future__ import annotations

import functools
from ctypes import CDLL

import torch
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.compute.native import library
from attnlm.config.settings import Config, ModelConfig
from attnlm.model import kernels
from attnlm.model.attention import SHORT, SelfAttention
from attnlm.model.models import AttentionModel, LanguageModel

_RUNGS = ("single-head", "multi-head", "wide-head")
# Seconds that a number of a batch's queries saves in C, forward and backward; measured with heads
# of 8 to 32. Larger ones gain nothing.
_SAVED, _SHARE_SAVED, _LARGEST_HEAD = 1e-8, 0.25, 32
# Beside the logits of a batch, so that rows do not begin at powers of two, which share a few places
# in a cache, and whole vectors can be read at their ends.
_PADDING = 16


def has_parts(config: Config, vocab_size: int) -> bool:
    """Whether training has parts, of this form of a step, that can be compiled."""
    model = config.model
    return (
        model.model in _RUNGS
        and not model.dropout
        and model.head_dim <= _LARGEST_HEAD
        and model.block_size <= SHORT
        and vocab_size <= config.training.batch_size * model.block_size
    )


def saved_by_compiling(config: Config) -> float:
    """How many seconds of a training, or of its budget, compiled parts are likely to save."""
    training, model = config.training, config.model
    if training.steps is None:
        return _SHARE_SAVED * (training.budget or 0)
    numbers = training.batch_size * model.block_size * model.num_heads * model.head_dim
    return training.steps * numbers * _SAVED


def compiled_parts(model: ModelConfig) -> CDLL | None:
    """The parts, compiled; None where there is no compiler, and for too large a head."""
    return library("one_layer.c", SIZE=model.head_dim)


def written_out(
    model: LanguageModel, batch_size: int, device: Device, compile: str
) -> OneLayer | None:
    """A model in this form, with compiled parts where `compile` is "parts".

    None where it can't be, or had better not be: a vocabulary larger than the batch would make the
    tables larger than what is looked up.
    """
    if not (
        isinstance(model, AttentionModel)
        and isinstance(model.body, SelfAttention)
        and model.body.dropout == 0
        and model.config.block_size <= SHORT
        and model.vocab_size <= batch_size * model.config.block_size
        and device.dtype == "float32"
        and kernels.suits(model.head.weight)
    ):
        return None
    compiled = compiled_parts(model.config) if compile == "parts" else None
    if compiled is None:
        return OneLayer(model, batch_size)
    return CompiledOneLayer(model, batch_size, compiled)


class OneLayer:
    """Loss and gradients of a model of one attention layer, for batches of one size.

    Made when the model's parameters lie where they stay: it holds views of them.
    """

    def __init__(self, model: AttentionModel, batch_size: int) -> None:
        body = model.body
        assert isinstance(body, SelfAttention)
        self._model, self._body = model, body
        self._parameters = _Parameters(model, body, gradients=False)
        heads, size, width = body.heads, body.head_size, body.heads * body.head_size
        length, vocab_size = model.config.block_size, model.vocab_size

        def memory(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=model.head.weight.dtype)

        def heads_first(packed_BTC: Tensor) -> Tensor:
            """(B, T, …·H·D) seen as (…, B, H, D, T)."""
            split = packed_BTC.view(batch_size, length, -1, heads, size)
            return split.permute(2, 0, 3, 4, 1)

        def for_products(packed_BTC: Tensor) -> Tensor:
            """Memory for the heads of `packed_BTC`; those of one head can stay where they are."""
            seen = heads_first(packed_BTC)
            return seen if heads == 1 else memory(*seen.shape)

        self._heads = heads
        self._copied = heads > 1
        self._scale = size**-0.5
        self._mask_TT = kernels.causal_mask(length, model.head.weight)
        self._embeddings_RC = memory(vocab_size + length, model.token_embedding.embedding_dim)
        self._tables = memory(vocab_size + length, 3 * width)
        self._positions = self._tables[vocab_size:]
        self._d_tables = memory(vocab_size + length, 3 * width)
        self._d_tokens, self._d_positions = self._d_tables.split((vocab_size, length))
        self._packed_BTC = memory(batch_size, length, 3 * width)
        self._packed_MC = self._packed_BTC.flatten(0, 1)
        self._packed_3BHDT = heads_first(self._packed_BTC)
        self._heads_3BHDT = for_products(self._packed_BTC)
        self._qkv = self._heads_3BHDT.flatten(1, 2).unbind()
        self._d_packed_BTC = memory(batch_size, length, 3 * width)
        self._d_packed_MC = self._d_packed_BTC.flatten(0, 1)
        self._d_packed_3BHDT = heads_first(self._d_packed_BTC)
        self._d_heads_3BHDT = for_products(self._d_packed_BTC)
        self._d_qkv = self._d_heads_3BHDT.flatten(1, 2).unbind()
        self._scores_NTT = memory(batch_size * heads, length, length)
        self._weights_NTT = memory(batch_size * heads, length, length)
        self._mixed_BTC = memory(batch_size, length, width)
        self._mixed_MC = self._mixed_BTC.flatten(0, 1)
        self._mixed_1BHDT = heads_first(self._mixed_BTC)
        self._mixed_heads_1BHDT = for_products(self._mixed_BTC)
        self._mixed_NDT = self._mixed_heads_1BHDT.flatten(0, 2)
        self._d_mixed_BTC = memory(batch_size, length, width)
        self._d_mixed_MC = self._d_mixed_BTC.flatten(0, 1)
        self._d_mixed_1BHDT = heads_first(self._d_mixed_BTC)
        self._d_mixed_heads_1BHDT = for_products(self._d_mixed_BTC)
        self._d_mixed_NDT = self._d_mixed_heads_1BHDT.flatten(0, 2)
        self._projected_MC = self._mixed_MC  # unless there is a projection
        tokens = batch_size * length
        self._logits_VM = memory(vocab_size, tokens + _PADDING)[:, :tokens]
        self._minus_one_1M = torch.full_like(self._logits_VM[:1], -1)

    @torch.no_grad()
    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss, nats per token; every parameter's `grad` is set to its gradient."""
        tokens = inputs_BT.reshape(-1)
        loss = self._loss(tokens, targets_BT.reshape(1, -1))
        self._predict_backward()
        self._attend_backward()
        self._look_up_backward(tokens)
        return loss

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss alone, of a batch of that one size."""
        return self._loss(inputs_BT.reshape(-1), targets_BT.reshape(1, -1))

    def _loss(self, tokens: Tensor, targets_1M: Tensor) -> Tensor:
        self._look_up(tokens)
        self._attend()
        self._predict()
        return self._cross_entropy(targets_1M)

    @functools.cached_property
    def _gradients(self) -> _Parameters:
        return _Parameters(self._model, self._body, gradients=True)

    def _look_up(self, tokens: Tensor) -> None:
        """Tokens → queries, keys and values."""
        p = self._parameters
        torch.cat((p.tokens, p.positions), out=self._embeddings_RC)
        torch.mm(self._embeddings_RC, p.qkv.T, out=self._tables)
        if p.qkv_bias is not None:
            self._positions += p.qkv_bias
        torch.index_select(self._tables, 0, tokens, out=self._packed_MC)
        self._packed_BTC += self._positions
        if self._copied:
            self._heads_3BHDT.copy_(self._packed_3BHDT)

    def _look_up_backward(self, tokens: Tensor) -> None:
        """Gradients of the embeddings and of the query, key and value maps."""
        p, d = self._parameters, self._gradients
        if self._copied:
            self._d_packed_3BHDT.copy_(self._d_heads_3BHDT)
        self._d_tokens.zero_().index_add_(0, tokens, self._d_packed_MC)
        torch.sum(self._d_packed_BTC, 0, out=self._d_positions)
        if d.qkv_bias is not None:
            torch.sum(self._d_positions, 0, out=d.qkv_bias)
        torch.mm(self._d_tables.T, self._embeddings_RC, out=d.qkv)
        torch.mm(self._d_tokens, p.qkv, out=d.tokens)
        torch.mm(self._d_positions, p.qkv, out=d.positions)

    def _attend(self) -> None:
        """Queries, keys and values → the heads' outputs, side by side."""
        q_NDT, k_NDT, v_NDT = self._qkv
        torch.baddbmm(self._mask_TT, q_NDT.mT, k_NDT, alpha=self._scale, out=self._scores_NTT)
        torch.softmax(self._scores_NTT, -1, out=self._weights_NTT)
        torch.bmm(v_NDT, self._weights_NTT.mT, out=self._mixed_NDT)
        if self._copied:
            self._mixed_1BHDT.copy_(self._mixed_heads_1BHDT)

    def _attend_backward(self) -> None:
        q_NDT, k_NDT, v_NDT = self._qkv
        d_q, d_k, d_v = self._d_qkv
        if self._copied:
            self._d_mixed_heads_1BHDT.copy_(self._d_mixed_1BHDT)
        torch.bmm(self._d_mixed_NDT, self._weights_NTT, out=d_v)
        d_weights = torch.bmm(self._d_mixed_NDT.mT, v_NDT, out=self._scores_NTT)
        d_scores = kernels.softmax_backward_(d_weights, self._weights_NTT)
        torch.baddbmm(d_q, k_NDT, d_scores.mT, beta=0, alpha=self._scale, out=d_q)
        torch.baddbmm(d_k, q_NDT, d_scores, beta=0, alpha=self._scale, out=d_k)

    def _predict(self) -> None:
        """The heads' outputs → logits."""
        p = self._parameters
        if p.projection is not None:
            self._projected_MC = self._mixed_MC @ p.projection.T
            if p.projection_bias is not None:
                self._projected_MC += p.projection_bias
        x_MC = self._projected_MC
        torch.addmm(p.head_bias[:, None], p.head, x_MC.T, out=self._logits_VM)

    def _predict_backward(self) -> None:
        """The gradients of projection, head, and the heads' outputs."""
        p, d = self._parameters, self._gradients
        x_MC, d_logits_VM = self._projected_MC, self._logits_VM
        torch.mm(d_logits_VM, x_MC, out=d.head)
        torch.sum(d_logits_VM, 1, out=d.head_bias)
        if p.projection is None or d.projection is None:
            torch.mm(d_logits_VM.T, p.head, out=self._d_mixed_MC)
            return
        d_x_MC = d_logits_VM.T @ p.head
        torch.mm(d_x_MC.T, self._mixed_MC, out=d.projection)
        if d.projection_bias is not None:
            torch.sum(d_x_MC, 0, out=d.projection_bias)
        torch.mm(d_x_MC, p.projection, out=self._d_mixed_MC)

    def _cross_entropy(self, targets_1M: Tensor) -> Tensor:
        """The mean loss; the logits become its gradient by them."""
        logits_VM = self._logits_VM
        top, at_target = logits_VM.amax(0), logits_VM.gather(0, targets_1M)
        probabilities_VM = torch.softmax(logits_VM, 0, out=logits_VM)
        # The likeliest token's −log p plus how far the target lies below it: nothing underflows.
        loss = (top - probabilities_VM.amax(0).log_() - at_target.squeeze(0)).mean()
        d_logits_VM = probabilities_VM.scatter_add_(0, targets_1M, self._minus_one_1M)
        d_logits_VM *= 1 / targets_1M.numel()
        return loss


class CompiledOneLayer(OneLayer):
    """The same, with attention and the loss in C: heads are read and written where they lie."""

    def __init__(self, model: AttentionModel, batch_size: int, compiled: CDLL) -> None:
        super().__init__(model, batch_size)
        self._compiled, self._copied = compiled, False
        batch, length, _ = self._packed_BTC.shape
        self._sizes = batch, length, self._heads, self._scale
        self._kept = torch.empty(batch * self._heads * compiled.attention_kept(length))
        self._scratch = torch.empty(compiled.attention_scratch(length))

    def _attend(self) -> None:
        self._compiled.attend(
            *self._sizes,
            self._packed_BTC.data_ptr(),
            self._mixed_BTC.data_ptr(),
            self._kept.data_ptr(),
            self._scratch.data_ptr(),
        )

    def _attend_backward(self) -> None:
        self._compiled.attend_backward(
            *self._sizes,
            self._packed_BTC.data_ptr(),
            self._mixed_BTC.data_ptr(),
            self._d_mixed_BTC.data_ptr(),
            self._kept.data_ptr(),
            self._d_packed_BTC.data_ptr(),
            self._scratch.data_ptr(),
        )

    def _cross_entropy(self, targets_1M: Tensor) -> Tensor:
        loss = torch.empty(())
        self._compiled.cross_entropy(
            *self._logits_VM.shape,
            self._logits_VM.stride(0),
            self._logits_VM.data_ptr(),
            targets_1M.data_ptr(),
            loss.data_ptr(),
        )
        return loss


class _Parameters:
    """A model's parameters, or the gradients of them, as plain tensors."""

    def __init__(self, model: AttentionModel, body: SelfAttention, *, gradients: bool) -> None:
        def plain(parameter: Tensor) -> Tensor:
            tensor = parameter.grad if gradients else parameter.detach()
            assert tensor is not None
            return tensor

        def plain_or_none(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else plain(parameter)

        self.tokens = plain(model.token_embedding.weight)
        self.positions = plain(model.position_embedding.weight)
        self.qkv = plain(body.qkv).flatten(0, 1)
        self.qkv_bias = plain_or_none(body.qkv_bias)
        projection = body.projection
        self.projection = None if projection is None else plain(projection.weight)
        self.projection_bias = None if projection is None else plain_or_none(projection.bias)
        self.head, self.head_bias = plain(model.head.weight), plain(model.head.bias)
