"""The loss of the one-layer rungs and its gradient, written out: all of backpropagation in a page.

A model this small spends its time between operations, not in them. So there are few: products for
all heads at once, into memory that is taken once, and no graph. Since there is one layer, queries,
keys and values are functions of a token plus functions of a position, W(e + p) = We + Wp; they are
computed once for each token of the vocabulary, and then looked up.

Axes as in attention.py. N counts heads of all windows, B·H; R the rows of the tables, V + T;
features stand before positions, (D, T), as in kernels.py. `d_x` is the gradient of the loss by x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlm import kernels
from attnlm.attention import SHORT, SelfAttention
from attnlm.model import AttentionModel, LanguageModel


def suits(model: LanguageModel, batch_size: int) -> bool:
    """Whether a step of this model can be, and had better be, made in this form.

    A vocabulary larger than the batch would make the tables larger than what is looked up.
    """
    return (
        isinstance(model, AttentionModel)
        and isinstance(model.body, SelfAttention)
        and model.body.dropout == 0
        and model.config.block_size <= SHORT
        and model.vocab_size <= batch_size * model.config.block_size
        and kernels.suits(model.head.weight)
    )


class OneLayer:
    """Loss and gradients of a model of one attention layer, for batches of one size."""

    def __init__(self, model: AttentionModel, batch_size: int) -> None:
        assert isinstance(model.body, SelfAttention)
        self._model, self._body = model, model.body
        heads, size = model.body.heads, model.body.head_size
        block_size, vocab_size = model.config.block_size, model.vocab_size
        rows, width = vocab_size + block_size, heads * size

        def memory(*shape: int) -> Tensor:
            return model.head.weight.new_empty(shape, requires_grad=False)

        self._mask_TT = kernels.causal_mask(block_size, model.head.weight)
        self._embeddings_RC = memory(rows, model.token_embedding.embedding_dim)
        self._tables, self._d_tables = memory(rows, 3 * width), memory(rows, 3 * width)
        self._packed = memory(batch_size, block_size, 3 * width)
        self._heads_3BHDT = memory(3, batch_size, heads, size, block_size)
        self._d_heads_3BHDT = memory(3, batch_size, heads, size, block_size)
        self._scores_NTT = memory(batch_size * heads, block_size, block_size)
        self._weights_NTT = memory(batch_size * heads, block_size, block_size)
        self._mixed_NDT = memory(batch_size * heads, size, block_size)
        self._d_mixed_NDT = memory(batch_size * heads, size, block_size)
        self._mixed_BTC = memory(batch_size, block_size, width)
        self._logits = memory(batch_size * block_size, vocab_size)
        self._minus_one = -torch.ones_like(self._logits[:, :1])

    @torch.no_grad()
    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss, nats per token; every parameter's `grad` is set to its gradient."""
        tokens, targets = inputs_BT.reshape(-1), targets_BT.reshape(-1, 1)
        self._look_up(tokens)
        self._attend()
        loss, d_mixed = self._predict(targets)
        self._attend_backward(d_mixed)
        self._look_up_backward(tokens)
        return loss

    def _look_up(self, tokens: Tensor) -> None:
        """Tokens → queries, keys and values."""
        model, body = self._model, self._body
        embeddings = model.token_embedding.weight, model.position_embedding.weight
        torch.cat(embeddings, out=self._embeddings_RC)
        torch.mm(self._embeddings_RC, body.qkv.flatten(0, 1).T, out=self._tables)
        positions = self._tables[model.vocab_size :]
        if body.qkv_bias is not None:
            positions += body.qkv_bias
        torch.index_select(self._tables, 0, tokens, out=self._packed.flatten(0, 1))
        self._packed += positions
        self._heads_3BHDT.copy_(_features_first(self._packed, body))

    def _look_up_backward(self, tokens: Tensor) -> None:
        """Gradients of the embeddings and of the query, key and value maps."""
        model, body = self._model, self._body
        _features_first(self._packed, body).copy_(self._d_heads_3BHDT)
        self._d_tables.zero_().index_add_(0, tokens, self._packed.flatten(0, 1))
        d_positions = self._d_tables[model.vocab_size :]
        torch.sum(self._packed, 0, out=d_positions)
        if body.qkv_bias is not None:
            torch.sum(d_positions, 0, out=body.qkv_bias.grad)
        torch.mm(self._d_tables.T, self._embeddings_RC, out=_gradient(body.qkv).flatten(0, 1))
        weight = body.qkv.flatten(0, 1)
        d_tokens, d_positions = self._d_tables.split((model.vocab_size, len(d_positions)))
        torch.mm(d_tokens, weight, out=model.token_embedding.weight.grad)
        torch.mm(d_positions, weight, out=model.position_embedding.weight.grad)

    def _attend(self) -> None:
        """Queries, keys and values → the heads' outputs, side by side."""
        q_NDT, k_NDT, v_NDT = self._heads_3BHDT.flatten(1, 2)
        scale = self._body.head_size**-0.5
        torch.baddbmm(self._mask_TT, q_NDT.mT, k_NDT, alpha=scale, out=self._scores_NTT)
        torch.softmax(self._scores_NTT, -1, out=self._weights_NTT)
        torch.bmm(v_NDT, self._weights_NTT.mT, out=self._mixed_NDT)
        mixed_BCT = self._mixed_NDT.view(self._mixed_BTC.mT.shape)
        self._mixed_BTC.copy_(mixed_BCT.mT)

    def _attend_backward(self, d_mixed: Tensor) -> None:
        q_NDT, k_NDT, v_NDT = self._heads_3BHDT.flatten(1, 2)
        d_q, d_k, d_v = self._d_heads_3BHDT.flatten(1, 2)
        d_mixed_BCT = self._d_mixed_NDT.view(self._mixed_BTC.mT.shape)
        d_mixed_BCT.copy_(d_mixed.view(self._mixed_BTC.shape).mT)
        torch.bmm(self._d_mixed_NDT, self._weights_NTT, out=d_v)
        d_weights = torch.bmm(self._d_mixed_NDT.mT, v_NDT, out=self._scores_NTT)
        d_scores = kernels.softmax_backward_(d_weights, self._weights_NTT)
        torch.bmm(k_NDT, d_scores.mT, out=d_q)
        torch.bmm(q_NDT, d_scores, out=d_k)
        self._d_heads_3BHDT[:2] *= self._body.head_size**-0.5

    def _predict(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, the gradients of projection and head, and that of the heads' outputs."""
        head, projection = self._model.head, self._body.projection
        mixed = self._mixed_BTC.flatten(0, 1)
        x = mixed if projection is None else projection(mixed)
        logits = torch.addmm(head.bias, x, head.weight.T, out=self._logits)
        top, at_target = logits.amax(1), logits.gather(1, targets)
        probabilities = torch.softmax(logits, 1, out=logits)
        # The likeliest token's −log p plus how far the target lies below it: nothing underflows.
        loss = (top - probabilities.amax(1).log_() - at_target.squeeze(1)).mean()
        d_logits = probabilities.scatter_add_(1, targets, self._minus_one)
        d_logits *= 1 / len(targets)
        torch.mm(d_logits.T, x, out=head.weight.grad)
        torch.sum(d_logits, 0, out=head.bias.grad)
        d_x = d_logits @ head.weight
        if projection is None:
            return loss, d_x
        torch.mm(d_x.T, mixed, out=projection.weight.grad)
        if projection.bias is not None:
            torch.sum(d_x, 0, out=projection.bias.grad)
        return loss, d_x @ projection.weight


def _features_first(packed: Tensor, body: SelfAttention) -> Tensor:
    """A view of (B, T, 3·H·D) as (3, B, H, D, T)."""
    split = packed.view(*packed.shape[:2], 3, body.heads, body.head_size)
    return split.permute(2, 0, 3, 4, 1)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
