"""The loss of one attention layer and its gradient, written out: the one model written by hand.

A model this small spends its time between operations, not in them. So there are few: products for
all heads at once, into memory that is taken once, and no graph. Since there is one layer, queries,
keys and values are functions of a token plus functions of a position, W(e + p) = We + Wp; they are
computed once for each token of the vocabulary, and then looked up.

Measured: operations under autograd, the same C among them, take twice as long a step.

Axes as in attention.py. M counts the tokens of a batch, B·T; N the heads of all its windows,
B·H; R the rows of the tables, V + T. Features stand before positions, (D, T).
`d_x` is the gradient of the loss by x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import CDLL

import torch
from torch import Tensor

from attnlm.compute.device import Device
from attnlm.compute.native import library
from attnlm.model.architecture import Architecture
from attnlm.model.attention import SelfAttention
from attnlm.model.language_model import LanguageModel, Transformer
from attnlm.model.ops import Kernels, operations_in_c

# All weights are held at once.
LONGEST_CONTEXT = 256
# Larger heads gain nothing in C.
LARGEST_NATIVE_HEAD = 32
# Beside the logits of a batch, so that rows do not begin at powers of two, which share a few places
# in a cache.
_PADDING = 16


# Parts of a model that may have any value in this form; all others have their defaults.
_FREE = (
    *("model", "embed_dim", "block_size", "heads", "kv_heads", "head_size", "wide_heads"),
    *("qkv_bias", "projection", "bias"),
)


def is_one_layer(a: Architecture, vocab_size: int, tokens: int) -> bool:
    """Return True if this form is for such a model, and for batches of so many tokens.

    A vocabulary larger than the batch would make the tables larger than what is looked up.
    """
    free = {name: getattr(a, name) for name in _FREE}
    return (
        a == Architecture(**free, head_bias=True)
        and a.num_kv_heads == a.heads
        and a.embed_dim is not None
        and a.block_size <= LONGEST_CONTEXT
        and vocab_size <= tokens
    )


def native_parts(a: Architecture) -> CDLL | None:
    """The parts, compiled; None where there is no compiler, and for too large a head."""
    return library("one_layer.c", SIZE=a.head_dim) if operations_in_c() is not None else None


def one_layer_form(
    model: LanguageModel, batch_size: int, device: Device, kernels: Kernels
) -> OneLayer | None:
    """A model in this form, with operations in C if `kernels` say so.

    None where the form is not for this model, or not the faster one here.
    """
    a = model.architecture
    if (
        not isinstance(model, Transformer)
        or not is_one_layer(a, model.vocab_size, batch_size * a.block_size)
        or (device.name, device.dtype) != ("cpu", "float32")
        or model.head.weight.dtype != torch.float32
        or not model.head.weight.is_cpu
    ):
        return None
    compiled = native_parts(a) if kernels.compiled else None
    if compiled is None:
        return OneLayer(model, batch_size)
    return NativeOneLayer(model, batch_size, compiled)


class OneLayer:
    """Loss and gradients of a model of one attention layer, for batches of one size.

    Made when the model's parameters lie where they stay: it holds views of them and, from the first
    call on, of their gradients.
    """

    def __init__(self, model: Transformer, batch_size: int) -> None:
        self._model = model
        self._parameters = _Parameters(model, Tensor.detach)
        a = model.architecture
        heads, size, width = a.heads, a.head_dim, a.heads * a.head_dim
        length, vocab_size = a.block_size, model.vocab_size

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
        self._mask_TT = memory(length, length).fill_(-torch.inf).triu_(1)
        self._qkv_NC = memory(3 * width, model.token_embedding.embedding_dim)
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
        """The mean loss, nats per token; its gradient is added to every parameter's `grad`."""
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
        return _Parameters(self._model, _gradient)

    def _look_up(self, tokens: Tensor) -> None:
        """Tokens → queries, keys and values."""
        p = self._parameters
        torch.cat((p.tokens, p.positions), out=self._embeddings_RC)
        torch.cat(p.qkv, out=self._qkv_NC)
        torch.mm(self._embeddings_RC, self._qkv_NC.T, out=self._tables)
        if p.qkv_bias:
            self._positions += torch.cat(p.qkv_bias)
        torch.index_select(self._tables, 0, tokens, out=self._packed_MC)
        self._packed_BTC += self._positions
        if self._copied:
            self._heads_3BHDT.copy_(self._packed_3BHDT)

    def _look_up_backward(self, tokens: Tensor) -> None:
        """Gradients of the embeddings and of the query, key and value maps."""
        d = self._gradients
        if self._copied:
            self._d_packed_3BHDT.copy_(self._d_heads_3BHDT)
        self._d_tokens.zero_().index_add_(0, tokens, self._d_packed_MC)
        torch.sum(self._d_packed_BTC, 0, out=self._d_positions)
        if d.qkv_bias:
            for bias, found in zip(d.qkv_bias, self._d_positions.sum(0).chunk(3), strict=True):
                bias += found
        for weight, found in zip(d.qkv, self._d_tables.chunk(3, 1), strict=True):
            weight.addmm_(found.T, self._embeddings_RC)
        d.tokens.addmm_(self._d_tokens, self._qkv_NC)
        d.positions.addmm_(self._d_positions, self._qkv_NC)

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
        d_scores = d_weights.mul_(self._weights_NTT)
        d_scores.addcmul_(self._weights_NTT, d_scores.sum(-1, keepdim=True), value=-1)
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
        d.head.addmm_(d_logits_VM, x_MC)
        d.head_bias += d_logits_VM.sum(1)
        if p.projection is None or d.projection is None:
            torch.mm(d_logits_VM.T, p.head, out=self._d_mixed_MC)
            return
        d_x_MC = d_logits_VM.T @ p.head
        d.projection.addmm_(d_x_MC.T, self._mixed_MC)
        if d.projection_bias is not None:
            d.projection_bias += d_x_MC.sum(0)
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


class NativeOneLayer(OneLayer):
    """The same, with attention and the loss in C: heads are read and written where they lie."""

    def __init__(self, model: Transformer, batch_size: int, compiled: CDLL) -> None:
        super().__init__(model, batch_size)
        self._compiled, self._copied = compiled, False
        parts = operations_in_c()
        assert parts is not None
        self._pointwise = parts
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
        tokens = targets_1M.numel()
        loss = torch.zeros((), dtype=torch.float64)
        self._pointwise.cross_entropy(
            *self._logits_VM.shape,
            self._logits_VM.stride(0),
            1 / tokens,
            None,
            self._logits_VM.data_ptr(),
            targets_1M.data_ptr(),
            loss.data_ptr(),
            None,
        )
        return loss.div_(tokens).float()


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Parameters:
    """A model's parameters, or the gradients of them, as plain tensors."""

    def __init__(self, model: Transformer, plain: Callable[[Tensor], Tensor]) -> None:
        attention, positions = model.blocks[0].attention, model.position_embedding
        assert isinstance(attention, SelfAttention) and positions is not None
        maps = (attention.query, attention.key, attention.value)
        self.tokens, self.positions = plain(model.token_embedding.weight), plain(positions.weight)
        self.qkv = [plain(m.weight) for m in maps]
        self.qkv_bias = [plain(m.bias) for m in maps if m.bias is not None]
        self.projection = self.projection_bias = None
        if attention.projection is not None:
            self.projection = plain(attention.projection.weight)
            if attention.projection.bias is not None:
                self.projection_bias = plain(attention.projection.bias)
        self.head, self.head_bias = plain(model.head.weight), plain(model.head.bias)
